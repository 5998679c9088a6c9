"""What is loaded is what was written, and what is wrong is said precisely."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.core import config
from ingot.core.errors import ConfigError, IngotError, UnknownName


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.lr < 0:
            raise ValueError(f"lr must not be negative, got {self.lr}")


@dataclass(frozen=True, kw_only=True)
class Source:
    path: Path
    weight: float = 1.0
    color: Color = Color.RED
    columns: tuple[str, ...] = ()
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    name: str
    steps: int = 10
    resume: bool = False
    level: Level = Level.LOW
    mode: Literal["fast", "exact"] = "exact"
    cache: Path | None = None
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(lr=0.5, clip=1.0))
    second: Optimizer | None = None
    sources: list[Source] = field(default_factory=list[Source])
    stages: tuple[Optimizer, ...] = ()
    groups: dict[str, Optimizer] = field(default_factory=dict[str, Optimizer])
    labels: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    derived: int = field(init=False, default=7)


FLOATS = st.floats(allow_nan=True, allow_infinity=True)
OPTIMIZERS = st.builds(
    Optimizer,
    lr=st.floats(min_value=0, allow_infinity=True) | st.just(math.nan),
    betas=st.tuples(FLOATS, FLOATS),
    clip=st.none() | FLOATS,
)
SOURCES = st.builds(
    Source,
    path=st.text().map(Path),
    weight=FLOATS,
    color=st.sampled_from(Color),
    columns=st.lists(st.text(), max_size=2).map(tuple),
    note=st.none() | st.text(),
)
RUNS = st.builds(
    Run,
    name=st.text(),
    steps=st.integers(),
    resume=st.booleans(),
    level=st.sampled_from(Level),
    mode=st.sampled_from(["fast", "exact"]),
    cache=st.none() | st.text().map(Path),
    # In this place clip is 1.0 by default, so that None cannot be said.
    optimizer=OPTIMIZERS.filter(lambda optimizer: optimizer.clip is not None),
    second=st.none() | OPTIMIZERS,
    sources=st.lists(SOURCES, max_size=3),
    stages=st.lists(OPTIMIZERS, max_size=3).map(tuple),
    groups=st.dictionaries(st.text(), OPTIMIZERS, max_size=3),
    labels=st.dictionaries(st.text(), st.lists(st.integers(), max_size=2), max_size=3),
)


def load(text: str, tmp_path: Path, *overrides: str) -> Run:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return config.load(Run, path, overrides)


def message(error: pytest.ExceptionInfo[IngotError]) -> str:
    return str(error.value)


@settings(deadline=None)
@given(run=RUNS)
def test_a_saved_config_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, run: Run
) -> None:
    path = tmp_path_factory.getbasetemp() / "saved.toml"
    config.save(run, path)
    loaded = config.load(Run, path)
    # repr distinguishes -0.0 from 0.0 and an int from a float, and all NaNs are equal in it.
    assert repr(loaded) == repr(run)
    assert "nan" in repr(run) or loaded == run


def test_a_file_and_overrides_give_every_kind_of_field(tmp_path: Path) -> None:
    text = """
name = "x"
level = 2
mode = "fast"
cache = "/tmp/c"
groups.slow.lr = 1
labels = {a = [1, 2]}
[optimizer]
betas = [0, 1]
[[sources]]
path = "a"
color = "blue"
columns = ["text"]
"""
    run = load(text, tmp_path, "steps=5", "sources=[{path='b'}]", 'groups."a.b".lr=inf')
    assert run == Run(
        name="x",
        steps=5,
        level=Level.HIGH,
        mode="fast",
        cache=Path("/tmp/c"),
        optimizer=Optimizer(lr=0.5, clip=1.0, betas=(0.0, 1.0)),
        sources=[Source(path=Path("b"))],
        groups={"slow": Optimizer(lr=1.0), "a.b": Optimizer(lr=math.inf)},
        labels={"a": [1, 2]},
    )
    assert type(run.groups["slow"].lr) is float


def test_a_partial_table_keeps_the_rest_of_the_fields_own_default() -> None:
    run = config.load(Run, overrides=["name=x", "optimizer.lr=3e-4"])
    assert run.optimizer == Optimizer(lr=3e-4, clip=1.0)


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("name=plain", "plain"),
        ("name=two words # not a comment", "two words # not a comment"),
        ("name = spaced ", "spaced"),
        ("name=a=b", "a=b"),
        ("name=", ""),
        ("name='123'", "123"),
        ('name="tab\\t"', "tab\t"),
        ("name=True", "True"),
        ("name='x'\nsteps=3", "'x'\nsteps=3"),
    ],
)
def test_an_override_that_is_not_toml_is_a_bare_string(override: str, name: str) -> None:
    run = config.load(Run, overrides=[override])
    assert run == Run(name=name)


def test_the_last_override_wins() -> None:
    overrides = ["name=x", "optimizer.lr=1", "optimizer={lr=2}", "optimizer.lr=3"]
    assert config.load(Run, overrides=overrides).optimizer.lr == 3


@pytest.mark.parametrize(
    ("text", "place", "nearest"),
    [
        ("nmae = 'x'", "nmae", "name"),
        ("[optimizer]\nlrr = 1", "optimizer.lrr", "lr"),
        ("[second]\nbeta = 1", "second.beta", "betas"),
        ("[[sources]]\npath = 'a'\n[[sources]]\npaht = 'a'", "sources[1].paht", "path"),
        ("[[stages]]\nclips = 1", "stages[0].clips", "clip"),
        ('[groups."a.b"]\nrl = 1', 'groups."a.b".rl', "lr"),
        ("derived = 1", "derived", None),
    ],
)
def test_an_unknown_key_anywhere_is_refused(
    tmp_path: Path, text: str, place: str, nearest: str | None
) -> None:
    with pytest.raises(UnknownName) as error:
        load(text, tmp_path, "name=x")
    assert f"unknown key at {place} in {tmp_path / 'run.toml'}: " in message(error)
    assert nearest is None or f"did you mean '{nearest}'?" in message(error)


def test_an_unknown_key_in_an_override_names_the_override() -> None:
    with pytest.raises(UnknownName) as error:
        config.load(Run, overrides=["name=x", "optimizer.lrr=1", "steps=1"])
    assert "at optimizer.lrr in override 'optimizer.lrr=1': 'lrr'" in message(error)


@pytest.mark.parametrize(
    ("text", "place", "problem"),
    [
        ("steps = '3'", "steps", "expected `int`, got `str`"),
        ("steps = 3.5", "steps", "expected `int`, got `float`"),
        ("steps = true", "steps", "expected `int`, got `bool`"),
        ("resume = 1", "resume", "expected `bool`, got `int`"),
        ("mode = 'slow'", "mode", "give it one of 'fast', 'exact'"),
        ("level = 3", "level", "give it one of 1, 2"),
        ("cache = 3", "cache", "expected `Path`, got `int`"),
        ("optimizer = 3", "optimizer", "expected `table`, got `int`"),
        ("optimizer.lr = {}", "optimizer.lr", "expected `float`, got `table`"),
        ("optimizer.betas = [1]", "optimizer.betas", "of length 2, got 1"),
        ("optimizer.betas = [1, 'x']", "optimizer.betas[1]", "expected `float`, got `str`"),
        ("optimizer.betas = [1, 2, 3]", "optimizer.betas", "of length 2, got 3"),
        ("second.clip = 'x'", "second.clip", "expected `float | null`, got `str`"),
        ("sources = [{path = 'a', color = 'pink'}]", "sources[0].color", "one of 'red', 'blue'"),
        ("sources = [3]", "sources[0]", "expected `table`, got `int`"),
        ("groups.a.lr = 'x'", "groups.a.lr", "expected `float`, got `str`"),
        ("labels.'b c' = [1, 'x']", 'labels."b c"[1]', "expected `int`, got `str`"),
    ],
)
def test_a_wrong_type_says_where_and_what_was_expected(
    tmp_path: Path, text: str, place: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load(text, tmp_path, "name=x")
    assert message(error).startswith(f"{place} in {tmp_path / 'run.toml'}: ")
    assert problem in message(error)


def test_a_wrong_type_from_an_override_names_it_and_how_to_quote(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load("name = 'x'", tmp_path, "steps=1", "name=123")
    assert message(error).startswith("name in override 'name=123': expected `str`, got `int`")
    assert """quote it: name='"123"'""" in message(error)


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [("steps = 1", "name", "str"), ("name='x'\n[[sources]]", "sources[0].path", "Path")],
)
def test_a_missing_field_is_named(tmp_path: Path, text: str, place: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(text, tmp_path)
    file = tmp_path / "run.toml"
    assert f"missing {place} (in {file}): expected {expected}" in message(error)


def test_a_missing_field_without_any_file() -> None:
    with pytest.raises(ConfigError, match=r"missing name \(in no config file\)"):
        config.load(Run)


def test_a_value_that_the_class_refuses_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load("name = 'x'\n[groups.a]\nlr = 1", tmp_path, "groups.a.lr=-1")
    file = tmp_path / "run.toml"
    expected = f"groups.a in {file}, override 'groups.a.lr=-1': lr must not be negative, got -1.0"
    assert message(error).startswith(expected)


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"a = 1\nb = = 2\n", "line 2"), (b"a = '\xff'", "utf-8"), (b"a = 1\na = 2\n", "line 2")],
)
def test_a_file_that_is_not_toml_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"run\.toml is not TOML: .*{problem}"):
        config.load(Run, path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: No such file"):
        config.load(Run, tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        config.load(Run, tmp_path)


@pytest.mark.parametrize("override", ["steps", "", "=3", "a..b=1", "two words=1", "a.=1"])
def test_an_override_without_a_key_and_value_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"write it as dotted\.key=value"):
        config.load(Run, overrides=[override])


@pytest.mark.parametrize("text", ["optimizer = 1", "optimizer = [{}]"])
def test_an_override_through_a_value_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="goes through optimizer, which is not a table"):
        load(text, tmp_path, "optimizer.lr=1")


@dataclass(frozen=True, kw_only=True)
class Awkward:
    required: int | None
    sizes: tuple[int | None, ...] = ()
    by_name: dict[str, int | None] = field(default_factory=dict[str, int | None])
    limit: int | None = 3
    inner: Optimizer | None = None
    text: str = ""


@pytest.mark.parametrize(
    ("awkward", "place"),
    [
        (Awkward(required=None), "required"),
        (Awkward(required=1, limit=None), "limit"),
        (Awkward(required=1, sizes=(1, None)), "sizes[1]"),
        (Awkward(required=1, by_name={"a": None}), "by_name.a"),
        (Run(name="x", optimizer=Optimizer(clip=None)), "optimizer.clip"),
    ],
)
def test_a_none_that_cannot_be_read_back_is_refused(awkward: object, place: str) -> None:
    with pytest.raises(ConfigError) as error:
        config.dumps(awkward)
    assert message(error).startswith(f"{place} is None, ")


def test_a_none_that_is_the_default_is_left_out() -> None:
    assert config.dumps(Awkward(required=1, inner=Optimizer())) == (
        'required = 1\nsizes = []\nlimit = 3\ntext = ""\n\n[by_name]\n\n'
        "[inner]\nlr = 0.001\nbetas = [\n    0.9,\n    0.95,\n]\n"
    )


def test_a_string_that_utf8_cannot_carry_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    with pytest.raises(ConfigError, match="not valid Unicode"):
        config.save(Awkward(required=1, text="\udcff"), path)
    assert not path.exists()


@dataclass(frozen=True, kw_only=True)
class Abstract:
    many: Sequence[Optimizer] = ()
    named: Mapping[str, Annotated[Optimizer, "documented"]] = field(
        default_factory=dict[str, Optimizer]
    )
    mixed: tuple[int, Optimizer] | None = None
    size: Annotated[int, msgspec.Meta(gt=0)] = 1


def test_abstract_containers_and_annotations_hide_no_unknown_key() -> None:
    for override in ("many=[{x=1}]", "named.a.x=1", "mixed=[1, {x=1}]"):
        with pytest.raises(UnknownName, match=r"unknown key at \S+x in override"):
            config.load(Abstract, overrides=[override])
    with pytest.raises(ConfigError, match="size in override 'size=0': expected `int` >= 1"):
        config.load(Abstract, overrides=["size=0"])
    loaded = config.load(Abstract, overrides=["many=[{lr=1}]", "mixed=[1, {lr=2}]"])
    assert loaded == Abstract(many=[Optimizer(lr=1)], mixed=(1, Optimizer(lr=2)))


def test_the_config_stays_frozen() -> None:
    run: Any = config.load(Run, overrides=["name=x"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.steps = 3


@dataclass(frozen=True, kw_only=True)
class Cosine:
    steps: int


@dataclass(frozen=True, kw_only=True)
class Linear:
    steps: int
    end: float
    start: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    schedule: Cosine | Linear | None = None


@pytest.mark.parametrize("schedule", [None, Cosine(steps=3), Linear(steps=3, end=0.5)])
def test_of_several_dataclasses_the_keys_say_which(schedule: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    config.save(Scheduled(schedule=schedule), path)
    assert config.load(Scheduled, path) == Scheduled(schedule=schedule)


def test_of_several_dataclasses_the_nearest_names_what_is_wrong() -> None:
    with pytest.raises(UnknownName, match="did you mean 'start'"):
        config.load(Scheduled, None, ["schedule.steps=3", "schedule.end=1.0", "schedule.strat=1.0"])
    with pytest.raises(ConfigError, match=r"missing schedule\.steps"):
        config.load(Scheduled, None, ["schedule.end=1.0"])


@dataclass(frozen=True, kw_only=True)
class Lion:
    kind: Literal["lion"] = "lion"
    lr: float = 1e-4


@dataclass(frozen=True, kw_only=True)
class Lars:
    kind: Literal["lars"] = "lars"
    lr: float = 1.0
    momentum: float = 0.9


@dataclass(frozen=True, kw_only=True)
class Tagged:
    optimizer: Lion | Lars = Lion()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], Lion()),
        (["optimizer.lr=2.0"], Lion(lr=2.0)),
        (["optimizer.kind=lars"], Lars()),
        (["optimizer.lr=2.0", "optimizer.kind=lars"], Lars(lr=2.0)),
    ],
)
def test_of_several_dataclasses_a_tag_says_which(
    overrides: list[str], expected: object, tmp_path: Path
) -> None:
    found = config.load(Tagged, None, overrides)
    assert found.optimizer == expected
    config.save(found, tmp_path / "resolved.toml")
    assert config.load(Tagged, tmp_path / "resolved.toml") == found


def test_a_tag_is_stronger_than_the_other_keys() -> None:
    with pytest.raises(UnknownName, match=r"optimizer\.momentum"):
        config.load(Tagged, None, ["optimizer.kind=lion", "optimizer.momentum=0.5"])


def test_an_unknown_tag_names_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"optimizer\.kind.*'lyon'") as raised:
        config.load(Tagged, None, ["optimizer.kind=lyon"])
    assert raised.value.hint == "did you mean 'lion'? valid: lars, lion"


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e-9, 10.1, "1"])
def test_a_number_out_of_its_bounds_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"Lion\.lr: expected a number"):
        config.check_bounds(Lion(lr=value), lr=(0.0, 10.0))
    config.check_bounds(Lion(lr=10), lr=(0.0, 10.0))
