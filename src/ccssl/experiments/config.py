"""The configuration of a run: a value that can be printed, saved and run again.

``RunConfig`` says everything a run depends on. It is flat, so that every field is a flag of ``ccssl train`` and a line
of a YAML file; only the hyperparameters of the method stand in a mapping of their own, ``options``, because each method
has others. They are checked by the method's ``Config``.

Importing this loads neither torch nor numpy, making a configuration does: the command line needs the names of fields
and what they mean, and no more, to answer ``--help`` at once.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import yaml

from ccssl._version import __version__
from ccssl.errors import InputError, did_you_mean
from ccssl.images.networks import NETWORKS
from ccssl.methods.config import CONFIGS
from ccssl.training.config import TrainingConfig, one_of, setting

if TYPE_CHECKING:
    from ccssl.images.splits import Sampling
    from ccssl.methods import Method

SELECTIONS = ("last", "best")


class Configuration(Protocol):
    """A configuration of any kind of run."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for YAML and JSON."""
        ...


DEFAULT_CALIBRATION_FRACTION = 0.25


@dataclass(frozen=True, kw_only=True)
class RunConfig(TrainingConfig):
    """Everything that a run depends on."""

    dataset: str = setting(
        "digits", "name of a data set (ccssl data list), a .npz file, a packed folder or a folder of images"
    )
    fold: int | None = setting(None, "STL-10: take the labels of this predefined fold, 0 to 9")
    labels: int = setting(40, "number of labels, calibration included")
    label_sampling: Sampling = field(
        default="balanced", metadata={"help": "how labels are chosen: balanced over classes, or iid"}
    )
    calibration_fraction: float | None = setting(
        None,
        f"share of the labels kept for calibration; {DEFAULT_CALIBRATION_FRACTION} for conformal methods, else 0",
    )
    validation: int = setting(0, "training images kept aside with their labels, to choose by")
    flip: bool | None = setting(
        None, "whether a mirrored image keeps its class, so that views are mirrored; what the data say if not given"
    )
    include_labeled: bool = setting(False, "put the labeled training images into the unlabeled pool, too")
    model: str = setting("small", f"network: {', '.join(NETWORKS)}")
    method: str = setting("ccssl-prop", f"how to learn: {', '.join(CONFIGS)}")
    options: Mapping[str, Any] = field(default_factory=dict, metadata={"help": "hyperparameters of the method"})
    select: str = setting("last", "which averaged network is reported: the last, or the best on validation")

    def __post_init__(self) -> None:
        """Refuse what no run can be made of."""
        from ccssl.images.splits import SAMPLINGS
        from ccssl.methods import METHODS

        super().__post_init__()
        tables = {"method": METHODS, "model": NETWORKS, "label_sampling": SAMPLINGS, "select": SELECTIONS}
        for name, table in tables.items():
            one_of(name, getattr(self, name), table)
        if self.labels < 1 or self.validation < 0:
            raise InputError(
                f"labels must be at least 1 and validation at least 0, got {self.labels} and {self.validation}."
            )
        if self.calibration_fraction is not None and not 0 <= self.calibration_fraction < 1:
            raise InputError(f"calibration_fraction must lie in [0, 1), got {self.calibration_fraction}.")
        if self.calibration_fraction == 0 and self.method_class.uses_calibration:
            raise InputError(f"calibration_fraction must be above 0: {self.method} learns from calibration items.")
        if self.select == "best" and not self.validation:
            raise InputError("select best needs validation images to choose by: give validation, too.")
        self.method_config()

    @property
    def method_class(self) -> type[Method]:
        """The class of the method."""
        from ccssl.methods import METHODS

        return METHODS[self.method]

    def method_config(self) -> Any:
        """Return the method's own configuration."""
        known = self.method_class.Config
        names = [f.name for f in fields(known)]
        for name in self.options:
            if name not in names:
                takes = f"takes {', '.join(names)}" if names else "takes no options"
                raise InputError(f"method {self.method} {takes}, got {name!r}.{did_you_mean(name, names)}")
        return known(**self.options)

    @property
    def calibration_share(self) -> float:
        """The share of labels that calibrates: what was asked for, or the method's default."""
        if not self.method_class.uses_calibration:
            return 0.0
        return DEFAULT_CALIBRATION_FRACTION if self.calibration_fraction is None else self.calibration_fraction

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for YAML and JSON."""
        return {**asdict(self), "options": dict(self.options)}


def config_from(values: Mapping[str, Any], base: RunConfig | None = None) -> RunConfig:
    """Return a configuration from plain data; unknown names and wrong types are refused."""
    values = typed(values, RunConfig)
    method = values.get("method", base.method if base else RunConfig.method)
    if method in CONFIGS and "options" in values:
        types = {f.name: str(f.type) for f in fields(CONFIGS[method])}
        values["options"] = {name: _number(v, types.get(name, "")) for name, v in values["options"].items()}
    return replace(base, **values) if base else RunConfig(**values)


def typed(values: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Return plain data as the fields of a configuration of a kind, having refused unknown names and wrong types."""
    types = {f.name: str(f.type) for f in fields(kind)}
    found = {}
    for name, value in values.items():
        if name not in types:
            raise InputError(f"a configuration has no field {name!r}.{did_you_mean(name, list(types))}")
        found[name] = _number(value, types[name])
        if not _fits(found[name], types[name]):
            raise InputError(f"{name} must be {types[name]}, got {value!r}.")
    return {name: float(v) if "float" in types[name] and v is not None else v for name, v in found.items()}


def read_config(path: Path) -> dict[str, Any]:
    """Return the fields that a YAML file sets; ``made_with`` of a run's own file is passed over."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not YAML: {str(error).splitlines()[0]}.") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} must hold names and values, one a line, got {type(found).__name__}.")
    return {str(name): value for name, value in found.items() if name != "made_with"}


def config_text(config: Configuration) -> str:
    """Return a configuration as YAML, with what it was run with."""
    return yaml.safe_dump({**config.to_dict(), "made_with": made_with()}, sort_keys=False)


def made_with() -> dict[str, str]:
    """Return versions and the git commit of the code."""
    import torch

    return {
        "ccssl": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "commit": _commit(),
    }


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Name the fields in which two configurations differ, with both values."""
    names = [name for name in ours if ours[name] != theirs.get(name, ours[name])]
    return [f"{name} ({theirs[name]!r} there, {ours[name]!r} here)" for name in names]


def _number(value: Any, wanted: str) -> Any:
    """Return the number that a text writes where one is wanted: to YAML 1.1, 3e-2 is a text."""
    if "float" in wanted and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            pass
    return value


def _fits(value: Any, wanted: str) -> bool:
    if value is None:
        return "None" in wanted
    if "Mapping" in wanted:
        return isinstance(value, Mapping)
    if "bool" in wanted:
        return isinstance(value, bool)
    if "float" in wanted:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if "int" in wanted:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, str)


def _commit() -> str:
    """Return the commit of the source tree, with a mark where it has changes; empty where git does not keep it."""
    here = Path(__file__)
    try:
        kept, told = (
            subprocess.run(
                ["git", *words], cwd=here.parent, capture_output=True, text=True, timeout=10, check=False
            )
            for words in (
                ["ls-files", "--error-unmatch", here.name],
                ["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            )
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return told.stdout.strip() if kept.returncode == 0 else ""
