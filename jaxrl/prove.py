"""Prove that jaxrl works on this machine, and measure how fast: one page, and one file to send.

    python -m jaxrl.prove [--quick] [--small] [--out=FOLDER] [--again=SECTION,...]

Needs nothing but jaxrl: models have random weights, and nothing is fetched. Each section runs in a
process of its own and leaves its result in the folder (default: proof); a call that was killed goes
on where it was. In this order: machine, doctor (gradients, masks, sampler), kernels against
references, update (MFU), memory against the plan, decode against the bandwidth, sync of weights,
quickstart to its reward, resume after SIGKILL, bit for bit.

--quick: one size of model, fewer checks, and at most about 15 minutes: sections that are not done
by then are left out, and the same command goes on with them; --small: tiny models, minutes on a
CPU, where it is the only choice; --again: sections to do anew.

FOLDER/proof.html is the page; FOLDER/proof.json has all of it without names and places of this
machine. Exit status: 0 all sections passed, or were skipped or left out for a reason that they
say, 1 one failed, 2 bad input. docs/prove.md shows a page and says what each section does.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl import cli
from jaxrl.tools.prove.proof import JSON, PAGE, prove

__all__ = ["main", "prove"]


@cli.command(__doc__, bare=None)
def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.prove [--quick] [--small] [--out=FOLDER] [--again=SECTION,...]`."""
    arguments = cli.Arguments()
    arguments.add_argument("--out", type=Path, default=Path("proof"))
    arguments.add_argument("--quick", action="store_true")
    arguments.add_argument("--small", action="store_true")
    arguments.add_argument("--again", default="")
    options = arguments.parse_args(argv)
    if options.quick and options.small:
        raise ValueError("--quick --small: give one of them, --small is the smaller")
    mode = "small" if options.small else "quick" if options.quick else "whole"
    again = [name for name in options.again.split(",") if name]
    succeeded = prove(options.out, mode, again, lambda text: print(text, flush=True))
    print(f"\n{options.out / PAGE} is the page; {options.out / JSON} can be sent")
    return cli.DONE if succeeded else cli.FAILED


if __name__ == "__main__":
    sys.exit(main())
