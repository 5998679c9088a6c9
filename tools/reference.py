"""Write the reference pages while the site is built: commands, recipe keys, variables, metrics.

A hook of mkdocs. Each page has a marker that is replaced by tables generated from the code, so the
reference cannot be stale: commands from their help, recipe keys from the configuration dataclasses
and the strings below their fields, metrics from the collector that Prometheus scrapes.
"""

# pyright: basic
from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import io
import os
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

_GENERIC = {"kind": "Selects the type of this section."}
MARKER = "<!-- reference -->"
PACKAGE = Path(__file__).parent.parent / "ingot"

VARIABLES = {
    "INGOT_ISA": "Limits the CPU kernels to a lower ISA tier: `amx`, `avx512_bf16`, "
    "`avx512_vnni`, `avx512`, `avx2` or `portable`. Used to test tiers and to reproduce bits "
    "across machines.",
    "INGOT_CXXFLAGS": "Additional flags for compiling the CPU kernels; part of the cache key.",
    "CXX": "The C++ compiler for the CPU kernels. Default: the first of g++ and clang++ found.",
    "XDG_CACHE_HOME": "Parent of ingot's cache: compiled kernels, measured peaks, tokenized data. "
    "Default: `~/.cache`.",
    "XDG_DATA_HOME": "Parent of training runs, evaluation results and downloaded models. Default: "
    "`~/.local/share`.",
    "GOMP_SPINCOUNT": "How long PyTorch's OpenMP threads spin before they sleep. The `ingot` "
    "command sets it to 10000 unless it is set.",
    "GLOO_SOCKET_IFNAME": "Network interface of collectives on CPUs. `ingot train --ranks` "
    "and `--tp` set it to `lo` unless it is set.",
    "TRITON_INTERPRET": "`1` runs the Triton kernels in Triton's interpreter on the CPU.",
    "TRITON_CACHE_DIR": "Where Triton keeps compiled kernels; `ingot kernels` sets it for its "
    "own processes.",
    "CUDA_VISIBLE_DEVICES": "The GPUs that torch may use; named in the error when none is visible.",
    "HIP_VISIBLE_DEVICES": "The same for AMD GPUs.",
    "ROCR_VISIBLE_DEVICES": "The same for AMD GPUs.",
    "LOCAL_RANK": "The index of a rank on its machine, and of its GPU; torchrun sets it.",
    "WORLD_SIZE": "The number of ranks of a training run; torchrun and `--ranks` set it.",
    "TORCHELASTIC_RESTART_COUNT": "How often torchrun has started a training run again; above 0, "
    "it continues from its newest checkpoint.",
    "OMP_NUM_THREADS": "The threads of a process on the CPU. Replicas of `ingot serve` and ranks "
    "share the cores unless it is set.",
    "OPENBLAS_NUM_THREADS": "The process that engines are forked from sets it to 1: NumPy would "
    "start threads, of which a fork copies only one.",
    "TORCH_CPP_LOG_LEVEL": "`ingot profile` sets it to `ERROR` unless it is set: torch's profiler "
    "prints warnings that say nothing about the model.",
    "RAY_ADDRESS": "The Ray cluster of `ingot serve --ray`; read by Ray.",
    "COLUMNS": "The width of tables when the output is not a terminal.",
    "HF_ENDPOINT": "The hub that `ingot pull` downloads from; read by huggingface_hub.",
    "OPENAI_API_KEY": "The key that `ingot compare` sends to a server, if it is set.",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "The collector that `ingot serve` sends traces to, by OTLP over "
    "HTTP; without it, there are none. All variables of OpenTelemetry's SDK apply, such as "
    "`OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER` and `OTEL_EXPORTER_OTLP_HEADERS`.",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "The same, as the whole address for traces.",
    "OTEL_TRACES_EXPORTER": "`none` disables traces.",
    "HF_TOKEN": "The access token for private and gated models; read by huggingface_hub.",
}
"""Every environment variable that the package reads or sets; a test compares it with the code."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the marker of a reference page by its content."""
    render = PAGES.get(page.file.src_uri)
    return markdown.replace(MARKER, render()) if render else markdown


def render_commands() -> str:
    """Render the help of every command."""
    from ingot.cli import SUMMARIES

    sections: list[str] = []
    for verb in SUMMARIES:
        names = [(verb, name) for name in _subcommands(verb)] or [(verb,)]
        summary = SUMMARIES[verb]
        sections.append(f"## ingot {verb}\n\n{summary[0].upper()}{summary[1:]}.")
        for arguments in names:
            title = f"### ingot {' '.join(arguments)}\n\n" if len(arguments) > 1 else ""
            sections.append(f"{title}```text\n{_help(arguments)}\n```")
    return "\n\n".join(sections)


def render_recipe() -> str:
    """Render the keys of a recipe: its own, then those of each section and kind."""
    from ingot.training.recipe import Recipe

    seen: dict[type, str] = {}
    return "\n\n".join(_sections(Recipe, "", seen))


def render_variables() -> str:
    """Render the environment variables."""
    rows = [(f"`{name}`", text) for name, text in VARIABLES.items()]
    return _table(("variable", "meaning"), rows)


def render_metrics() -> str:
    """Render every metric that the server exports, with its type and labels."""
    from ingot.serving.engine.output import EngineStats
    from ingot.serving.server.metrics import (
        GAUGES,
        SERVER_GAUGES,
        EngineCollector,
        Metrics,
        ModelMetrics,
        ServerMetrics,
    )
    from ingot.serving.workers.wire import EngineReady

    ready = EngineReady(
        model="",
        vocab_size=1,
        max_model_len=1,
        block_size=1,
        num_blocks=1,
        kv_cache_dtype="int8",
        kv_cache_bytes=960,
    )
    stats = EngineStats(**dict.fromkeys(EngineStats.__struct_fields__, 0))
    model = ModelMetrics("", Metrics(), [(ready, stats)], dict.fromkeys(GAUGES, 0.0))
    server = ServerMetrics([model], {200: 1}, dict.fromkeys(SERVER_GAUGES, 0.0))
    collector = EngineCollector(lambda: server)
    rows: list[tuple[str, ...]] = []
    for family in collector.collect():
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = dict.fromkeys(label for sample in family.samples for label in sample.labels)
        shown = ", ".join(f"`{label}`" for label in labels if label != "le")
        rows.append((f"`{family.name}{suffix}`", family.type, shown, family.documentation))
    return _table(("metric", "type", "labels", "meaning"), rows)


PAGES: dict[str, Callable[[], str]] = {
    "cli.md": render_commands,
    "recipe.md": render_recipe,
    "environment.md": render_variables,
    "metrics.md": render_metrics,
}


def variables_in(source: str) -> set[str]:
    """Return the environment variables that a module names.

    >>> sorted(variables_in("os.environ.get('A')\\nos.environ['B'] = '1'\\n'C' in os.environ"))
    ['A', 'B', 'C']
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(
                func=ast.Attribute(value=value), args=[ast.Constant(value=str(name)), *_]
            ):
                if _is_environ(value) or _is_getenv(node):
                    names.add(name)
            case ast.Subscript(value=value, slice=ast.Constant(value=str(name))):
                if _is_environ(value):
                    names.add(name)
            case ast.Compare(left=ast.Constant(value=str(name)), comparators=[other]):
                if _is_environ(other):
                    names.add(name)
            case _:
                pass
    return names


def _is_environ(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "environ"


def _is_getenv(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr == "getenv"


def _subcommands(verb: str) -> list[str]:
    from ingot.cli import load_command

    command = load_command(verb)
    return list(command) if isinstance(command, dict) else []


def _help(arguments: tuple[str, ...]) -> str:
    from ingot.cli import main

    os.environ["COLUMNS"] = "76"
    output = io.StringIO()
    with redirect_stdout(output), suppress(SystemExit):
        main([*arguments, "--help"])
    return output.getvalue().rstrip()


def _sections(config: type, prefix: str, seen: dict[type, str]) -> Iterator[str]:
    """Yield a section for a dataclass and, after it, one for each dataclass in its fields."""
    kind = _kind(config) or (config.__name__ if prefix in seen.values() else None)
    seen[config] = prefix
    title = f"`{prefix}`" + (f": {kind}" if kind else "") if prefix else "Top level"
    summary = inspect.cleandoc(config.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    hints, texts = typing.get_type_hints(config), field_docs(config)
    rows: list[tuple[str, ...]] = []
    nested: list[tuple[str, type]] = []
    for field in dataclasses.fields(config):
        key, hint = f"{prefix}.{field.name}".lstrip("."), hints[field.name]
        nested += [(key, part) for part in _dataclasses_in(hint)]
        rows.append(
            (
                f"`{key}`",
                _type(hint),
                _default(field),
                texts.get(field.name, _GENERIC.get(field.name, "")),
            )
        )
    yield f"## {title}\n\n{summary}\n\n" + _table(("key", "type", "default", "meaning"), rows)
    for key, part in nested:
        if part not in seen:
            yield from _sections(part, key, seen)


def field_docs(config: type) -> dict[str, str]:
    """Return the string below each field of a dataclass, by the field's name."""
    docs: dict[str, str] = {}
    for base in reversed(config.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for field, text in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                match text:
                    case ast.Expr(value=ast.Constant(value=str(doc))):
                        docs[field.target.id] = " ".join(doc.split())
                    case _:
                        pass
    return docs


def _kind(config: type) -> str | None:
    hint = typing.get_type_hints(config).get("kind")
    kinds = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
    return ", ".join(kinds) or None


def _dataclasses_in(hint: Any) -> list[type]:
    parts = _parts(hint)
    return [part for part in parts if isinstance(part, type) and dataclasses.is_dataclass(part)]


def _parts(hint: Any) -> list[Any]:
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return list(typing.get_args(hint)) if union else [hint]


def _type(hint: Any) -> str:
    names: list[str] = []
    kinds: list[str] = []
    for part in _parts(hint):
        if typing.get_origin(part) is typing.Literal:
            names += [f'`"{value}"`' for value in typing.get_args(part)]
        elif isinstance(part, type) and dataclasses.is_dataclass(part):
            kinds.append(_kind(part) or "")
        elif isinstance(part, type) and issubclass(part, enum.Enum):
            names += [f'`"{member.value}"`' for member in part]
        elif part is not type(None):
            names.append(part.__name__ if _is_plain(part) else str(part))
    if kinds:
        names.append("section" + (f" ({', '.join(filter(None, kinds))})" if any(kinds) else ""))
    return ", ".join(names).replace("|", "\\|")


def _is_plain(part: Any) -> bool:
    return isinstance(part, type) and not typing.get_args(part)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return "" if field.default is None else f"`{_literal(field.default)}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{_literal(field.default_factory())}`"
    return "**required**"


def _literal(value: Any) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = getattr(value, "kind", None)
        return f'kind = "{kind}"' if kind else "see below"
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = (headings, ("---",) * len(headings), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
