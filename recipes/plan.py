"""`rollout plan`: what a model's bytes, a machine and drafts allow, and whether a fleet fits.

Everything is worked out from what is given or counted; nothing is run, save the measurement of this
machine's read bandwidth where none is given. See recipes/ceilings.py for the formulas.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from actors.engine_spec import EngineSpec, num_gpus
from quant.formats import FormatName
from recipes.ceilings import (
    Best,
    Costs,
    Payload,
    best_draft_len,
    break_even_rate,
    payload,
    tensor_shapes,
    tokens_per_s,
)
from recipes.config import RunConfig, engine_spec, load_config
from recipes.smollm2 import model_folder
from rollout.checkpoint import read_config
from rollout.errors import InvalidConfig

PROBE_BYTES = 2**29
"""Beyond what caches hold."""
WEIGHTS_SHARE = 0.9
"""Of a GPU's memory that weights and cache may take."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """What a proposer is expected to do."""

    rates: list[float]
    """Conditional acceptance by position; as many as the longest draft has."""
    costs: Costs
    """Beside the target of the first row."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """A target with drafts."""

    draft_cost: float
    """Of a token, in steps of this target: it is dearer beside a faster one."""
    break_even_rate: float | None
    """Acceptance, the same at every position, above which some length gains."""
    best: Best
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One format of the weights."""

    weights: str
    stored_bytes: float
    read_bytes: float
    plain_tokens_per_s: float
    drafted: Drafted | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Nodes:
    """Machines of one kind."""

    num: int
    gpus: int
    cpus: int
    gpu_bytes: float


@dataclass(frozen=True, slots=True)
class Placement:
    """Whether a recipe's actors fit on the nodes, and why not."""

    fits: bool
    text: str


def plan_command(arguments: argparse.Namespace) -> int:
    """Prints the plan; 1 where a fleet was to be placed and does not fit."""
    config = load_config(arguments.recipe, arguments.overrides) if arguments.recipe else None
    if config is None and arguments.nodes is not None:
        raise InvalidConfig("--nodes without a recipe: it is a recipe's actors that are placed")
    sizes = _given(arguments) if arguments.params else _counted(arguments.model, config)
    bandwidth, source = arguments.bandwidth, "given"
    if bandwidth is None:
        if config is not None and config.model.device != "cpu":
            raise InvalidConfig(
                "model.device=cuda without --bandwidth: give the GPU's in bytes/s, as 3.35e12 for an "
                "H100 SXM"
            )
        bandwidth = measure_read_bandwidth()
        source = f"read here with {torch.get_num_threads()} threads"
    num_gpus = 1 if config is None else max(1, _num_gpus(config))
    if num_gpus > 1:
        bandwidth, source = bandwidth * num_gpus, f"{source}, of the {num_gpus} GPUs of an actor"
    drafts = _drafts(arguments)
    rows = make_rows(sizes, bandwidth, drafts)
    placement = None
    if config is not None and arguments.nodes is not None:
        nodes = Nodes(
            arguments.nodes, arguments.gpus_per_node, arguments.cpus_per_node, arguments.gpu_memory
        )
        placement = place(config, nodes, rows[0].stored_bytes)
    if arguments.json:
        found = {
            "bandwidth": bandwidth,
            "drafts": drafts and asdict(drafts),
            "rows": [row.to_json() for row in rows],
            "placement": placement and asdict(placement),
        }
        print(json.dumps(found))
    else:
        _print(rows, f"one row, {bandwidth / 1e9:.4g} GB/s ({source})", placement)
    return 0 if placement is None or placement.fits else 1


def make_rows(sizes: dict[str, Payload], bandwidth: float, drafts: Drafts | None) -> list[Row]:
    """A row for each format; a draft keeps its time where the target's bytes, and with them its steps,
    get fewer."""
    first = next(iter(sizes.values())).read
    rows = []
    for name, size in sizes.items():
        plain = tokens_per_s(size.read, bandwidth)
        drafted = None if drafts is None else _drafted(drafts, first / size.read, plain)
        rows.append(Row(name, size.stored, size.read, plain, drafted))
    return rows


def _drafted(drafts: Drafts, times_faster: float, plain: float) -> Drafted:
    costs = replace(drafts.costs, draft=drafts.costs.draft * times_faster)
    best = best_draft_len(drafts.rates, costs)
    return Drafted(
        costs.draft, break_even_rate(costs, len(drafts.rates)), best, plain * best.speedup
    )


def _given(arguments: argparse.Namespace) -> dict[str, Payload]:
    sizes = {f"{bits:g} bits": arguments.params * bits / 8 for bits in arguments.bits}
    return {name: Payload(size, size) for name, size in sizes.items()}


def _counted(model: str | None, config: RunConfig | None) -> dict[str, Payload]:
    """The recipe's own format first, then the others that its engine has."""
    folder = model_folder(model or (config.model.path if config else "smollm2"))
    spec = engine_spec(config, folder) if config else EngineSpec(str(folder))
    decoder, shapes = read_config(folder), tensor_shapes(folder)
    formats: list[FormatName] = [spec.target_format, "none", "int8_w8a16", "int8_w8a8"]
    if spec.engine == "vllm":
        formats.remove("int8_w8a16")
    return {
        name if name != "none" else str(spec.torch_dtype).removeprefix("torch."): payload(
            shapes, decoder, name, spec.torch_dtype, quantised_head=spec.engine == "native"
        )
        for name in dict.fromkeys(formats)
    }


def _drafts(arguments: argparse.Namespace) -> Drafts | None:
    """None where nothing is said of them. Raises InvalidConfig for half of what is needed."""
    rates = arguments.rates
    if arguments.acceptance is not None:
        rates = [arguments.acceptance] * arguments.max_draft_len
    extra = arguments.verify_cost or arguments.overhead
    if rates is None and arguments.draft_cost is None and not extra:
        return None
    if rates is None or arguments.draft_cost is None:
        raise InvalidConfig("drafts need --draft-cost and --acceptance or --rates")
    if not all(0 <= rate <= 1 for rate in rates):
        raise InvalidConfig(f"acceptance {rates}: expected rates from 0 to 1")
    costs = Costs(arguments.draft_cost, arguments.verify_cost, arguments.overhead)
    if min(asdict(costs).values()) < 0:
        raise InvalidConfig(f"{costs}: expected costs of at least 0")
    return Drafts(rates, costs)


def measure_read_bandwidth() -> float:
    """Bytes a second at which this process's threads read memory: the better of two ways, best of
    five."""
    matrix, vector = torch.ones(PROBE_BYTES // 4 // 4096, 4096), torch.ones(4096)
    halves = matrix.view(-1).chunk(2)
    seconds = []
    for read in (lambda: torch.mv(matrix, vector), lambda: torch.dot(*halves)):
        for _ in range(5):
            started = time.perf_counter()
            read()
            seconds.append(time.perf_counter() - started)
    return PROBE_BYTES / min(seconds)


def place(config: RunConfig, nodes: Nodes, weights_bytes: float) -> Placement:
    """Every actor gets `actors.cpus` cores, and where `model.device` is cuda the GPUs that its model is
    split over, all of one node; a learner that sends by NCCL has a GPU that no actor has."""
    actors, num_gpus = config.actors, _num_gpus(config)
    cores = nodes.cpus or (os.cpu_count() or 1)
    fit = beside_learner = cores // actors.cpus
    needs, has = (
        f"{actors.num} actors of {actors.cpus} cores",
        f"{nodes.num} nodes of {cores} cores",
    )
    if num_gpus:
        sends = actors.weight_transfer == "nccl"
        beside_learner = min(fit, max(0, nodes.gpus - sends) // num_gpus)
        fit = min(fit, nodes.gpus // num_gpus)
        needs += f" and {num_gpus} GPUs of one node" if num_gpus > 1 else " and a GPU"
        needs += ", and a GPU for the learner," if sends else ""
        has += f" and {nodes.gpus} GPUs"
    held = fit * (nodes.num - 1) + beside_learner
    if actors.num > held:
        return Placement(False, f"{needs} do not fit on {has}, which hold {held}")
    if nodes.num > 1 and config.actors.address is None:
        return Placement(
            False,
            f"{nodes.num} nodes without actors.address: Ray would be started on this one only",
        )
    if num_gpus and weights_bytes > WEIGHTS_SHARE * num_gpus * nodes.gpu_bytes:
        gpus = "a GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
        return Placement(
            False,
            f"weights of {weights_bytes / 1e9:.1f} GB do not fit on {gpus} of "
            f"{nodes.gpu_bytes / 1e9:.0f} GB, and an actor has no more; raise actors.tensor_parallel",
        )
    return Placement(True, f"{needs} fit on {has}")


def _num_gpus(config: RunConfig) -> int:
    return num_gpus(config.model.device, config.actors.tensor_parallel)


def _print(rows: Sequence[Row], title: str, placement: Placement | None) -> None:
    console = Console()
    table = Table(title=title, box=SIMPLE)
    table.add_column("weights", no_wrap=True)
    for name in ("GB", "plain tok/s"):
        table.add_column(name, justify="right")
    if rows[0].drafted is not None:
        for name in ("draft cost", "pays above", "best length", "tokens", "gain", "tok/s"):
            table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.weights,
            f"{row.stored_bytes / 1e9:.4g}",
            f"{row.plain_tokens_per_s:.1f}",
            *([] if row.drafted is None else _drafted_cells(row.drafted)),
        )
    console.print(table)
    console.print("ceilings: cached keys and values, arithmetic and sampling come on top")
    if placement is not None:
        console.print(("" if placement.fits else "does not fit: ") + placement.text, soft_wrap=True)


def _drafted_cells(drafted: Drafted) -> list[str]:
    rate, best = drafted.break_even_rate, drafted.best
    return [
        f"{drafted.draft_cost:.3g}",
        "never" if rate is None else f"{rate:.2f}",
        str(best.draft_len),
        f"{best.tokens_per_round:.2f}",
        f"{best.speedup:.2f}",
        f"{drafted.tokens_per_s:.1f}",
    ]
