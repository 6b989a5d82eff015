"""A census of all model types:

    python -m tests.census plan OUTPUT.jsonl                      # a wrap plan for four classes of every type
    python -m tests.census train OUTPUT.jsonl                     # trains a tiny model of every type on 2 ranks
    python -m tests.census train OUTPUT.jsonl --mesh shard2xcp2   # with these degrees: cp2, cp4, tp2, ep2, tp2xep2, ...
    python -m tests.census live_weights OUTPUT.jsonl              # or any other of `tests.census.certificates`
    python -m tests.census all FOLDER                             # certificates: all of them, and one table

A row is written as it comes, and what has a row of the same code of transformers is not run again unless --only asks
for it; a summary (.md) is written beside the rows. All of it is compared with the plain model in one process
(`hf_fsdp_tools/proof`).
"""

import argparse
import sys
from pathlib import Path

from tests._dist import hide_gpus
from tests.census import certificates, trained

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("census", choices=("train", "all", *certificates.CENSUSES))
    parser.add_argument("output", type=Path, help="rows are added here (.jsonl, of `all` a folder)")
    parser.add_argument("--only", nargs="*", default=[], help="model types; default: all without a row")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--mesh", default="", metavar="DEGREES", help="of `train`; default: FSDP on 2 ranks")
    given = parser.parse_args()
    hide_gpus()
    if given.census == "all":
        sys.exit(certificates.certify(given.output, given.only, given.jobs))
    kind = certificates.CENSUSES.get(given.census) or trained.census_on(given.mesh)
    sys.exit(kind.write(given.output, given.only, given.jobs))
