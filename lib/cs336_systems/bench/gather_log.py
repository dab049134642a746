"""What FSDP gathers, uses and frees in a step, in order, and how much it holds: on a small Transformer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from cs336_systems.configs import model_size
from cs336_systems.model import build_model
from cs336_systems.parallel import FSDP, WorkerContext, launch
from cs336_systems.parallel.fsdp_units import Unit

MB = 2**20


def log_gathers(
    world_size: int,
    options: Mapping[str, Mapping[str, Any]],
    *,
    num_layers: int = 6,
    backend: str = "gloo",
    timeout_s: float = 600.0,
) -> list[dict[str, Any]]:
    """The second step of a tiny Transformer of `num_layers` with each set of options, as a rank sees it.

    Args:
        options: by name, arguments of `FSDP`.
        backend, timeout_s: as in `launch`.

    Returns:
        One dictionary for each thing that happens to a unit: implementation (the name of the options), pass
        ("forward" or "backward"), event ("gather", "use", "free" or "reduce"), unit (the name of its module),
        messages (weights that are gathered or reduced), mb (2**20 bytes of its whole weights), held_mb (of
        all units that are gathered from then on), and total_mb (of all units there are).
    """
    by_name = {name: dict(arguments) for name, arguments in options.items()}
    return launch(_log, world_size, by_name, num_layers, backend=backend, timeout_s=timeout_s)[0]


class _Logged(FSDP):
    """Notes what happens to its units."""

    log: list[dict[str, Any]] | None = None

    def _note(self, event: str, unit: Unit) -> None:
        if self.log is not None:
            index = self._order.index(unit)
            module = next(module for module, position in self._positions.items() if position == index)
            names = {other: name for name, other in self.module.named_modules()}
            row = {"pass": self.of_pass, "event": event, "unit": names[module]}
            row |= {"messages": len(unit.weights), "mb": unit.nbytes / MB}
            self.log.append(row | {"held_mb": sum(other.nbytes for other in self._gathered) / MB})

    def _collect(self, unit: Unit, following: Sequence[Unit]) -> None:
        started = [other for other in (unit, *following) if not other.is_gathered]
        super()._collect(unit, following)
        for other in started:
            self._note("gather", other)
        self._note("use", unit)

    def _free(self, unit: Unit) -> None:
        super()._free(unit)
        self._note("free", unit)

    def _start_reduction(self, unit: Unit) -> None:
        super()._start_reduction(unit)
        self._note("reduce", unit)


def _log(
    context: WorkerContext, options: dict[str, dict[str, Any]], num_layers: int
) -> Iterable[dict[str, Any]]:
    config, rows = replace(model_size("tiny"), num_layers=num_layers), []
    tokens = torch.zeros(1, 16, dtype=torch.long, device=context.device)
    for name, arguments in options.items():
        wrapped = _Logged(build_model(config, 16, device=context.device), **arguments)
        for log in (None, []):  # in the first step the order is not known
            wrapped.log, wrapped.of_pass = log, "forward"
            loss = wrapped(tokens).sum()
            wrapped.of_pass = "backward"
            loss.backward()
            wrapped.finish_gradient_synchronization()
        total = sum(unit.nbytes for unit in wrapped._units) / MB
        rows += [{"implementation": name} | row | {"total_mb": total} for row in wrapped.log]
    return rows
