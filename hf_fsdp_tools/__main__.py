"""`python -m hf_fsdp_tools` is the command `hf-fsdp`."""

import sys

from hf_fsdp_tools.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
