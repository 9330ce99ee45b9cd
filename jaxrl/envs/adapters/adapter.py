"""What the environments of other libraries have in common: a name there, and a package."""

import importlib
from collections.abc import Mapping
from typing import Any

from jaxrl.envs.protocol import Env


class Adapter(Env):
    """Adapts an environment of another library.

    Args:
        env_config: settings of the run.
        extras: columns of the row.
        name: of the environment in that library; what stands after the colon of `env_class`.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
        *,
        name: str,
    ) -> None:
        super().__init__(env_config, extras)
        self.name = name

    @classmethod
    def of(cls, name: str) -> "type[Adapter]":
        """Return the class for a name.

        Raises:
            ValueError: the library has no such environment, or one that text does not suit.
            ImportError: the library is not installed.
        """
        return cls

    @classmethod
    def code_of(cls, name: str, extras: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of a row that choose what is imported, run or connected to.

        What the library itself has under a name is no choice of the row's.
        """
        return {}


def import_library(module: str, package: str, extra: str) -> Any:
    """Import and return a module of a library that only an adapter needs.

    Raises:
        ImportError: it cannot be imported; says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"the {module.partition('.')[0]} environments need the package {package}: "
            f"pip install 'jaxrl[{extra}]' ({error})"
        ) from error
