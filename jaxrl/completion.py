"""Let the shell complete commands, recipes and config fields: print the script that does it.

    source <(jaxrl completion bash)
    source <(jaxrl completion zsh)
    jaxrl completion fish | source

In ~/.bashrc, ~/.zshrc or ~/.config/fish/config.fish it is there from the next shell on. Then
`jaxrl train qu<TAB> --config.trainer.al<TAB>` needs no more typing.
"""

import sys
from collections.abc import Sequence

from jaxrl import cli
from jaxrl.tools.completion.words import completions, script


@cli.command(__doc__, bare=cli.REFUSED, help_first=True)
def main(argv: Sequence[str]) -> int:
    """Run `python -m jaxrl.completion SHELL`; the scripts run it with `--line` and what stands."""
    if argv[0] == "--line":
        print(*completions(" ".join(argv[1:])), sep="\n")
    else:
        print(script(argv[0]), end="")
    return cli.DONE


if __name__ == "__main__":
    sys.exit(main())
