"""A process that measures one contestant: requests and replies are JSON lines."""

import json
import os
import sys

from keras_efficient_attn.benchmark.environment import describe_environment
from keras_efficient_attn.benchmark.failures import describe_failure
from keras_efficient_attn.benchmark.measurement import Measurement


class Answers:
    """Executes requests, one contestant at a time."""

    def __init__(self):
        self._measurement = None

    def answer(self, request):
        """Returns the reply to a request, as a dict; a failure is a reply too."""
        try:
            if request["do"] == "prepare":
                self._measurement = None
                measurement = Measurement(request["task"])
                prepared = measurement.prepare()
                self._measurement = measurement
                return prepared
            if request["do"] == "repeat":
                return self._measurement.repeat(request["turn"])
            return self._measurement.check()
        except Exception as error:
            return describe_failure(error, building=request["do"] == "prepare")


def serve(answer):
    """Says what this process runs on, and answers the requests of the standard input.

    Args:
        answer: Callable from a request to its reply, both dicts.
    """
    # Libraries print to the standard output; replies need a separate stream.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(message):
        print(json.dumps(message), file=replies, flush=True)

    reply(describe_environment())
    for line in sys.stdin:
        reply(answer(json.loads(line)))


if __name__ == "__main__":
    serve(Answers().answer)
