"""Say what a process is told of this one's environment, where it runs or parses others' words.

Those words may be a model's, a row's or a harness's, and keys stand in the environment: of
trackers, of hubs, of judges. So such a process gets what is listed here, and what its starter adds
by name; docs/security.md has every process that is started, and what it gets.
"""

import os

_KEPT = frozenset(
    (
        *("PATH", "HOME", "TMPDIR", "LANG"),
        *("PYTHONPATH", "VIRTUAL_ENV"),  # of a Python program: where its packages are
        *("LD_LIBRARY_PATH", "SYSTEMROOT"),  # without which some Pythons do not start
    )
)


def child_environment() -> dict[str, str]:
    """Return the variables of this process that tell no secret."""
    return {k: v for k, v in os.environ.items() if k in _KEPT or k.startswith("LC_")}
