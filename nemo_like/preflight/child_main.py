"""The process behind ``child.ChildCall``."""

from __future__ import annotations

import os
import pickle
import sys

from nemo_like.preflight.child import Raised, Returned


def main() -> None:
    # What the function prints must not get between the answer's bytes.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    function, arguments = pickle.load(sys.stdin.buffer)
    try:
        outcome: Returned | Raised = Returned(function(*arguments))
    except Exception as error:
        outcome = Raised(f"{type(error).__name__}: {error}")
    answers.write(pickle.dumps(outcome))
    answers.close()
    # At once: threads and exit handlers of what was imported have nothing to do here.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
