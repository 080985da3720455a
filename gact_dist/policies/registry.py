"""The policy that a configuration names."""

from ..config import Config
from .acgc import Acgc
from .actnn import Actnn
from .base import Policy
from .fixed import Exact, Off, Uniform
from .gact import Gact, GactInBytes

_POLICIES: dict[str, type[Policy]] = {
    "gact": Gact,
    "actnn": Actnn,
    "acgc": Acgc,
    "uniform": Uniform,
    "exact": Exact,
    "off": Off,
}


def policy_of(config: Config) -> Policy:
    """The policy of a configuration."""
    return GactInBytes(config) if config.retained_bytes is not None else _POLICIES[config.policy](config)
