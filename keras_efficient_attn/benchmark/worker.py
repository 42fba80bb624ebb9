"""A process that measures one contestant: requests and replies are JSON lines."""

import json
import os
import sys

from keras_efficient_attn.benchmark.environment import describe_environment
from keras_efficient_attn.benchmark.failures import describe_failure
from keras_efficient_attn.benchmark.measurement import Measurement


def main():
    # Libraries print to the standard output; replies go where these do not.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(message):
        print(json.dumps(message), file=replies, flush=True)

    reply(describe_environment())
    measurement = prepared = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "prepare":
                measurement = prepared = None
                measurement = Measurement(request["task"])
                prepared = measurement.prepare()
                reply(prepared)
            elif request["do"] == "repeat":
                reply(measurement.repeat(request["turn"]))
            else:
                reply(measurement.check())
        except Exception as error:
            reply(describe_failure(error, building=prepared is None))


if __name__ == "__main__":
    main()
