"""The main function of the process that ``child.ChildCall`` starts."""

from __future__ import annotations

import os
import pickle
import sys

from nemo_like.observability.printable import accept_all_characters
from nemo_like.preflight.child import Raised, Returned


def main() -> None:
    # Answers go to a copy of stdout, and prints to stderr, so that no print gets between an answer's bytes.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    accept_all_characters()
    function, arguments = pickle.load(sys.stdin.buffer)
    try:
        outcome: Returned | Raised = Returned(function(*arguments))
    except Exception as error:
        outcome = Raised(f"{type(error).__name__}: {error}")
    answers.write(pickle.dumps(outcome))
    answers.close()
    # Exit at once, without waiting for threads and exit handlers of what was imported.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
