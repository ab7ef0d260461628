"""`--config FILE`: flags of a command as a mapping in YAML, of which JSON is a part."""

import argparse
from collections.abc import Iterator
from typing import Any

import yaml

from ..errors import ConfigError
from .flags import ALWAYS, unknown_name

MAX_BYTES = 64 << 10  # of a file: bounds what its parser may take
_TAG = "tag:yaml.org,2002:"
_BOOL = f"{_TAG}bool"
_NULL = f"{_TAG}null"
_WORDS = {f"{_TAG}{kind}" for kind in ("str", "int", "float", "timestamp", "bool")}
_TRUE = ("true", "yes", "on")
_NOT_IN_A_FILE = ("help", "config")
_LONGEST_NAME = 64  # letters of an unknown key that are shown


def read_config_file(path: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The values of the flags of `parser` that the file gives, by their names in the namespace.
    Raises ConfigError, with the file and the key, for what the command line would refuse."""
    return _File(path, parser).settings()


class _File:
    """A file of flags while it is read.

    Nodes are looked at, and no objects made of them: values are the words that stand in the file,
    as those of a command line are (a revision 010 is no 8), a key given twice is still there twice,
    and aliases of aliases take no memory."""

    def __init__(self, path: str, parser: argparse.ArgumentParser) -> None:
        self._path = path
        self._parser = parser
        self._actions = {
            option.lstrip("-"): action
            for option, action in parser._option_string_actions.items()
            if action.dest not in _NOT_IN_A_FILE
        }

    def settings(self) -> dict[str, Any]:
        """See `read_config_file`."""
        found = argparse.Namespace()
        keys: dict[str, str] = {}
        for key, node in self._pairs():
            action = self._action(key)
            if action.dest in keys:
                raise self._error(key, f"{key.value}: given before, as {keys[action.dest]}")
            keys[action.dest] = key.value
            values = self._values(action, key, node)
            if values is not None:
                setattr(found, action.dest, action.default)
                action(self._parser, found, values)
        return vars(found)

    def _pairs(self) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
        root = self._parsed()
        if root is None or root.tag == _NULL:  # empty, or comments alone
            return
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{self._path}: must be a mapping of flags to their values")
        for key, node in root.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._error(key, "a key must be the name of a flag")
            yield key, node

    def _parsed(self) -> yaml.Node | None:
        """The root of the document. What is said of an error shows nothing of the file, in which
        keys may stand."""
        text = self._bytes()
        if text.lstrip().startswith(b"{"):
            text = text.replace(b"\t", b" ")  # white space of JSON, which YAML does not have
        try:
            return yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            place = self._path if mark is None else f"{self._path}, line {mark.line + 1}"
            reason = getattr(error, "problem", None) or getattr(error, "reason", None)
            raise ConfigError(f"{place}: not YAML: {reason}") from None
        except RecursionError:
            raise ConfigError(f"{self._path}: nested too deeply") from None
        except (ValueError, OverflowError):  # an escape of a character that there is not
            raise ConfigError(f"{self._path}: not YAML") from None

    def _bytes(self) -> bytes:
        try:
            with open(self._path, "rb") as file:
                text = file.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"--config {self._path}: {reason}") from None
        if len(text) > MAX_BYTES:
            raise ConfigError(f"{self._path}: larger than {MAX_BYTES >> 10} KiB")
        return text

    def _action(self, key: yaml.ScalarNode) -> argparse.Action:
        """The flag that a key names, with dashes or underscores."""
        name = key.value.replace("_", "-")
        if name == "config":
            raise self._error(key, "config: a file of flags names no other")
        if name not in self._actions:
            shown = key.value if key.value.isprintable() else repr(key.value)
            text = unknown_name(shown[:_LONGEST_NAME], list(self._actions), kind="key", prefix="")
            raise self._error(key, text)
        return self._actions[name]

    def _values(self, action: argparse.Action, key: yaml.ScalarNode, node: yaml.Node) -> Any:
        """What `action` is called with; None for a switch that is off."""
        if action.nargs == 0:
            return [] if self._is_on(key, node) else None
        if action.nargs is None:
            if isinstance(node, yaml.SequenceNode):
                raise self._error(key, f"{key.value}: one value is expected, not a list")
            return self._value(action, key, node)
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        values = [self._value(action, key, part) for part in nodes]
        if isinstance(action.nargs, int) and len(values) != action.nargs:
            raise self._error(key, f"{key.value}: {action.nargs} in the list are expected")
        if not values:
            raise self._error(key, f"{key.value}: the list is empty")
        return values

    def _is_on(self, key: yaml.ScalarNode, node: yaml.Node) -> bool:
        if node.tag != _BOOL:
            raise self._error(key, f"{key.value}: true or false is expected")
        is_on: bool = node.value.lower() in _TRUE
        always = ALWAYS.get(key.value.replace("_", "-"))
        if always is not None and not is_on:
            raise self._error(key, f"{key.value}: it cannot be false: {always}")
        return is_on

    def _value(self, action: argparse.Action, key: yaml.ScalarNode, node: yaml.Node) -> Any:
        """One value, as argparse makes it of a word."""
        if isinstance(node, yaml.MappingNode):
            raise self._error(key, f"{key.value}: a value is expected, not a mapping")
        if isinstance(node, yaml.SequenceNode):
            raise self._error(key, f"{key.value}: a value is expected, not a list in a list")
        if node.tag == _NULL:
            raise self._error(key, f"{key.value}: there is no value")
        # off, on, yes and no are words where no switch stands: --check-invariants off.
        if node.tag == _BOOL and node.value.lower() in ("true", "false"):
            text = f"{key.value}: a value is expected, not true or false (in quotes it is a text)"
            raise self._error(key, text)
        if node.tag not in _WORDS:
            raise self._error(key, f"{key.value}: a value is expected, without a tag")
        try:
            value = self._parser._get_value(action, node.value)
            self._parser._check_value(action, value)
        except argparse.ArgumentError as error:
            raise self._error(key, f"{key.value}: {error.message}") from None
        return value

    def _error(self, node: yaml.Node, text: str) -> ConfigError:
        return ConfigError(f"{self._path}, line {node.start_mark.line + 1}: {text}")
