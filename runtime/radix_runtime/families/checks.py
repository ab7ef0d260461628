"""The one check that all readers share."""

from ..errors import ConfigError


def require(condition: bool, otherwise: str) -> None:
    """Raises ConfigError, with `otherwise` about config.json, unless the condition holds."""
    if not condition:
        raise ConfigError(f"config.json: {otherwise}")
