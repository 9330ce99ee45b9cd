"""A text game: find the key, open the door, take the gold. Each earns a reward in its turn."""

import random
import re
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxrl.envs.protocol import Env, StepOutput
from jaxrl.envs.toys.split import in_split

_REWARDS = {"key": 0.25, "door": 0.25, "gold": 0.5}
_MAX_DRAWS_PER_ROW = 100
_OPPOSITE = {"north": "south", "east": "west", "south": "north", "west": "east"}
_STEP = {"north": (0, 1), "east": (1, 0), "south": (0, -1), "west": (-1, 0)}
_ROOMS = (
    *("attic", "bakery", "cellar", "chapel", "garden", "hall", "kitchen", "library", "office"),
    *("porch", "stable", "studio", "tower", "vault", "workshop"),
)
_COMMAND = re.compile(
    r"\b(?:go (?:north|east|south|west)|take (?:key|gold)|open door)\b", re.IGNORECASE
)
# Lower case and few signs, for the models of configs/ that know single characters.
RULES = (
    "you are in a house. find the key, open the locked door, take the gold behind it. say one "
    "command in each turn, of go north, go east, go south, go west, take key, open door, take gold."
)


class World(NamedTuple):
    """Describes a house whose rooms form a tree; the gold lies in a leaf, behind a locked door.

    Attributes:
        exits: room -> direction -> room.
        start: the room in which the game begins.
        key, gold: the rooms in which they lie.
    """

    exits: dict[str, dict[str, str]]
    start: str
    key: str
    gold: str


class _State(NamedTuple):
    room: str
    has_key: bool = False
    is_open: bool = False
    has_gold: bool = False


class TextAdventureEnv(Env):
    """Rewards each feat in its turn: 0.25 for the key, 0.25 for opening the door, 0.5 for the gold.

    The last command of a response counts; one that cannot be done, or none, changes nothing and
    earns 0. The game answers with the room that one is in. The conversation ends with the gold, or
    after `max_turns` turns (a column of the row, or `generator.max_turns`).

    Columns: `passages`, the list of `[room, direction, room]` that can be gone both ways; `start`,
    `key` and `gold`, each a room.

    Raises:
        ValueError: a column is missing, or the game cannot be won.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(env_config, extras)
        self.world = _read_world(self.extras)
        solve(self.world)  # or it raises
        self.state = _State(self.world.start)

    def step(self, action: str) -> StepOutput:
        """Obeys the last command."""
        self.turns += 1
        commands = _COMMAND.findall(action)
        command = commands[-1].lower() if commands else None
        before, self.state = self.state, obey(self.world, self.state, command)
        done = self.state.has_gold or self.turns >= self.max_turns
        observation = "that does nothing. " if self.state == before else ""
        observation += describe(self.world, self.state)
        return StepOutput(
            observations=[] if done else [{"role": "user", "content": observation}],
            reward=_worth(self.state) - _worth(before),
            done=done,
            metadata={"command": command, "room": self.state.room},
        )

    def get_metrics(self) -> dict[str, Any]:
        """Return `key`, `door` and `gold`: 1 where they were got; `turns` that it took."""
        got = {"key": self.state.has_key, "door": self.state.is_open, "gold": self.state.has_gold}
        return {name: float(has) for name, has in got.items()} | {"turns": self.turns}


def describe(world: World, state: _State) -> str:
    """Says what there is to see."""
    room, exits = state.room, world.exits[state.room]
    sentences = f"{room}. exits {', '.join(exits)}."
    if room == world.key and not state.has_key:
        sentences += " a key lies here."
    if room == world.gold:
        return sentences + " gold lies here."
    locked = [way for way, to in exits.items() if to == world.gold]
    if locked and not state.is_open:
        sentences += f" the door {locked[0]} is locked."
    return sentences


def obey(world: World, state: _State, command: str | None) -> _State:
    """Return what a command makes of a state; the same state where it cannot be done."""
    verb, _, what = (command or "").partition(" ")
    exits = world.exits[state.room]
    if verb == "go" and what in exits and (exits[what] != world.gold or state.is_open):
        return state._replace(room=exits[what])
    if command == "take key" and state.room == world.key:
        return state._replace(has_key=True)
    if command == "open door" and state.has_key and world.gold in exits.values():
        return state._replace(is_open=True)
    if command == "take gold" and state.room == world.gold:
        return state._replace(has_gold=True)
    return state


def solve(world: World) -> list[str]:
    """Return the fewest commands that win.

    Raises:
        ValueError: the game cannot be won.
    """
    commands = (*(f"go {way}" for way in _STEP), "take key", "open door", "take gold")
    start = _State(world.start)
    came: dict[_State, tuple[_State, str] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        if state.has_gold:
            solution = []
            while (step := came[state]) is not None:
                state, command = step
                solution.append(command)
            return solution[::-1]
        for command in commands:
            after = obey(world, state, command)
            if after not in came:
                came[after] = state, command
                queue.append(after)
    raise ValueError(f"this game cannot be won: {world}")


def prompts(
    size: int, seed: int = 0, rooms: int = 4, split: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield rows of distinct games; the ground truth of each is its shortest solution.

    Args:
        size: number of rows.
        seed: which games are drawn, and their order.
        rooms: of each house, 2 to 15.
        split: "train" or "eval" draw from games that never meet; None draws from all.

    Raises:
        ValueError: there are too few games with so few rooms.
    """
    if size < 1 or not 2 <= rooms <= len(_ROOMS):
        raise ValueError(f"size={size} must be at least 1 and rooms={rooms} 2 to {len(_ROOMS)}")
    rng, seen = random.Random(seed), set()
    for _ in range(size * _MAX_DRAWS_PER_ROW):
        row = _draw(rng, rooms)
        text = repr(row)
        if text in seen or not in_split(text, split):
            continue
        seen.add(text)
        world = _read_world(row)
        opening = f"{RULES} {describe(world, _State(world.start))}"
        yield {
            "prompt": [{"role": "user", "content": opening}],
            "env_class": "text_adventure",
            "data_source": "text_adventure",
            "reward_spec": {"method": "rule", "ground_truth": "; ".join(solve(world))},
            **row,
        }
        if len(seen) == size:
            return
    raise ValueError(
        f"found only {len(seen)} games of {rooms} rooms in split {split!r}, size={size} were asked "
        "for; make size smaller or rooms larger"
    )


def _draw(rng: random.Random, count: int) -> dict[str, Any]:
    """Draws the columns of a house: rooms on a grid, each but the first beside an earlier one."""
    rooms = rng.sample(_ROOMS, count)
    places, passages = {(0, 0): rooms[0]}, []
    for room in rooms[1:]:
        free = [
            (at, way, (at[0] + dx, at[1] + dy))
            for at in places
            for way, (dx, dy) in _STEP.items()
            if (at[0] + dx, at[1] + dy) not in places
        ]
        at, way, to = rng.choice(free)
        passages.append([places[at], way, room])
        places[to] = room
    # The last room is a leaf: nothing but the gold is behind its door.
    return {
        "passages": passages,
        "start": rooms[0],
        "key": rng.choice(rooms[:-1]),
        "gold": rooms[-1],
    }


def _worth(state: _State) -> float:
    got = {"key": state.has_key, "door": state.is_open, "gold": state.has_gold}
    return sum((reward for name, reward in _REWARDS.items() if got[name]), 0.0)


def _read_world(extras: Mapping[str, Any]) -> World:
    try:
        exits: dict[str, dict[str, str]] = {}
        for room, way, to in extras["passages"]:
            for a, direction, b in (room, way, to), (to, _OPPOSITE[way], room):
                if direction in exits.setdefault(a, {}):
                    raise ValueError(f"two ways lead {direction} from {a}")
                exits[a][direction] = b
        # In a fixed order, whatever the order of the passages.
        exits = {a: {way: ways[way] for way in _STEP if way in ways} for a, ways in exits.items()}
        world = World(exits, extras["start"], extras["key"], extras["gold"])
        if not {world.start, world.key, world.gold} <= exits.keys() or world.gold == world.start:
            raise ValueError("start, key and gold are rooms, and the gold is not in the first")
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(
            "environment 'text_adventure' needs columns passages = [[room, direction, room], ..], "
            f"start, key and gold, as jaxrl.envs.toys.text_adventure:prompts makes them: {error!r}"
        ) from error
    return world
