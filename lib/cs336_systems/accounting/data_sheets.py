"""The machines of the scaling problems: what their makers publish, `hardware.csv`."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cs336_systems.arguments import check_choice


@dataclass(frozen=True)
class Hardware:
    """One device of a machine, and its private links.

    flops_per_s: dense, bfloat16. axes: of the torus that devices of one host or pod form; 1 for a switch.
    inside_devices: the most that can be joined so, a host or a pod. inside_bytes_per_s, between_bytes_per_s:
    what one device can send, in one direction, to those inside, over the links of all axes, and to other
    hosts or pods; nan where no source says.
    """

    name: str
    flops_per_s: float
    memory_bytes: float
    inside_bytes_per_s: float
    axes: int
    inside_devices: int
    between_bytes_per_s: float
    source: str

    @property
    def axis_bytes_per_s(self) -> float:
        """What one device can send along one axis of a mesh: W of the handout."""
        return self.inside_bytes_per_s / self.axes

    @property
    def host_bytes_per_s(self) -> float:
        """What a host or pod can send to others over the network links of all its devices."""
        return self.between_bytes_per_s * self.inside_devices


@cache
def machines() -> dict[str, Hardware]:
    """Those of the table by name, the handout's first."""
    import pandas as pd  # in no rank

    table = pd.read_csv(Path(__file__).with_name("hardware.csv"))
    return {row["name"]: Hardware(**row) for row in table.to_dict("records")}


def hardware(name: str) -> Hardware:
    """A machine of the table."""
    check_choice("hardware", name, machines())
    return machines()[name]
