"""Tools that an environment offers: methods of a group, found by name."""

from collections.abc import Callable
from typing import Any, TypeVar

_Method = TypeVar("_Method", bound=Callable[..., Any])


def tool(method: _Method) -> _Method:
    """Mark a method of a `ToolGroup` as a tool; its name is the tool's."""
    method.is_tool = True  # type: ignore[attr-defined]
    return method


class ToolGroup:
    """Hold tools that share what they need, such as a sandbox or a database.

    Example:

        class Clock(ToolGroup):
            @tool
            def now(self, zone: str) -> str: ...

        Clock("clock").execute_tool("now", "UTC")
    """

    def __init__(self, name: str) -> None:
        self.name = name
        methods = {key: getattr(self, key) for key in dir(type(self)) if not key.startswith("_")}
        self._tools = {key: m for key, m in methods.items() if getattr(m, "is_tool", False)}

    def get_name(self) -> str:
        """Return the name of the group."""
        return self.name

    def get_tool(self, name: str) -> Callable[..., Any] | None:
        """Return the bound method of a tool, or None."""
        return self._tools.get(name)

    def get_tool_names(self) -> list[str]:
        """Return the sorted names of the tools."""
        return list(self._tools)

    def get_tool_to_group_mapping(self) -> dict[str, str]:
        """Map the name of each tool to the name of this group."""
        return dict.fromkeys(self._tools, self.name)

    def execute_tool(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a tool.

        Raises:
            ValueError: the group has none of that name.
        """
        if name not in self._tools:
            raise ValueError(
                f"tool {name!r} not found in group {self.name!r}, which has "
                f"{', '.join(self._tools) or 'none'}"
            )
        return self._tools[name](*args, **kwargs)
