import sys

from keras_efficient_attn.benchmark.cli import main

if __name__ == "__main__":
    sys.exit(main())
