"""What each rank of `worlds.py` does."""

import sys

if __name__ == "__main__":
    from tests.replicas import own_loop_cases

    own_loop_cases.run(sys.argv[1:])
