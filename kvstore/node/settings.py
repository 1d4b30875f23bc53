"""Settings that are described only once, in a msgspec struct whose fields are `Annotated` with a `Setting`.

A command's flags, the variables, the keys of the TOML file and the error messages come from that description. So do the
commented files of `settings_file.py`, the manual page and the table in docs/operations.md. A setting has the same name
everywhere, for example field and key `log_level`, flag `--log-level`, variable `KVSTORE_SERVER_LOG_LEVEL`. A flag
overrides a variable, a variable overrides the file, and the file overrides the default.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from kvstore.cluster.url import join_address
from kvstore.sizes import parse_size, spell_size

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_HOST: Final = 255
DEFAULT: Final = "default"  # the source of a value that was not given
_HIDDEN: Final = "(secret)"

ConfigT = TypeVar("ConfigT", bound=msgspec.Struct)


class ConfigError(Exception):
    """The settings cannot be used. Each problem names the setting and the source of its value, and says what is
    expected. The message has one line per problem."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Misfit(ConfigError):
    """A setting is valid by itself but does not fit the other settings or the machine."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.name = name
        self.problem = problem


class Size(int):
    """A number of bytes, written like 4GiB."""

    def __str__(self) -> str:
        return spell_size(int(self))


class Portion(str):
    """A part of another size, either as a percentage of that size or as a number of bytes."""

    def of(self, whole: int) -> int:
        """Return this part of `whole` as a number of bytes."""
        return int(whole * float(self[:-1]) / 100) if self.endswith("%") else parse_size(self)


class HostPort(str):
    """An address to listen on: HOST:PORT or [IPv6]:PORT."""

    @classmethod
    def of(cls, host: str, port: int) -> HostPort:
        """Return the address of a host and a port."""
        return cls(join_address(host, port))

    @property
    def host(self) -> str:
        """The host, without brackets."""
        return self.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port, or 0 for any free port."""
        return int(self.rpartition(":")[2])


@dataclass(frozen=True)
class Setting:
    """The description of a setting, besides its name, type, bounds and default."""

    section: str
    help: str  # one or more sentences for an operator
    value: str = ""  # the placeholder of the value in the help: SECONDS, FOLDER
    choices: tuple[str, ...] = ()
    unset: str = ""  # the meaning of a default of None: "no disk tier"
    more: str = ""  # page and anchor in docs/ with more about it
    file_only: bool = False  # for tables of the file, which have no flag and no variable
    example: str = ""  # for `file_only`: the content of an example table
    secret: bool = False  # its value is never shown in messages, logs, pages or printed files


@dataclass(frozen=True)
class Described:
    """One setting with its name, type, default, bounds and description."""

    name: str
    kind: type  # int, bool, str, Size or HostPort; list for tables of the file
    default: Any
    low: int | None
    high: int | None
    setting: Setting

    @property
    def flag(self) -> str:
        """The flag, such as `--log-level`."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def value(self) -> str:
        """The placeholder of its value in the help."""
        if self.setting.choices:
            return "|".join(self.setting.choices)
        names = {Size: "SIZE", Portion: "N%|SIZE", HostPort: "HOST:PORT", int: "N"}
        return self.setting.value or names.get(self.kind, "TEXT")

    @property
    def expected(self) -> str:
        """Describe the values that are allowed."""
        if self.setting.choices:
            return f"one of {', '.join(self.setting.choices)}"
        if self.kind is int and self.low is not None and self.high is not None:
            return f"a whole number from {self.low} to {self.high}"
        return {
            int: "a whole number",
            bool: "true or false",
            str: "text",
            Size: "a size such as 512MiB, 4GiB or 512Mi, or a number of bytes",
            Portion: "a share from 0% to 100%, or a size such as 512MiB",
            HostPort: "HOST:PORT or [IPv6]:PORT, such as 0.0.0.0:9100",
        }[self.kind]

    @property
    def problem(self) -> str:
        """The error message for a value that is not allowed."""
        return f"expected {self.expected}"

    @property
    def default_text(self) -> str:
        """The default as text for people."""
        if self.default in (None, "", []):
            return self.setting.unset or "none"
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return str(self.default)


def describe(config: type[msgspec.Struct]) -> tuple[Described, ...]:
    """Return all settings of a struct, in order."""
    hints = get_type_hints(config, include_extras=True)
    return tuple(_describe(field, hints[field.name]) for field in msgspec.structs.fields(config))


def _describe(field: msgspec.structs.FieldInfo, hint: Any) -> Described:
    parts = list(_parts(hint))
    (setting,) = (part for part in parts if isinstance(part, Setting))
    bounds = next((part for part in parts if isinstance(part, msgspec.Meta)), msgspec.Meta())
    default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    is_tables = isinstance(default, list)
    kind = list if is_tables else next(part for part in parts if isinstance(part, type) and part is not type(None))
    low, high = (None if bound is None else int(bound) for bound in (bounds.ge, bounds.le))
    return Described(field.name, kind, default, low, high, setting)


def _parts(hint: Any) -> Iterator[Any]:
    """Yield the types and annotations in a type hint."""
    if get_origin(hint) is Annotated:
        yield from _parts(hint.__origin__)
        yield from hint.__metadata__
    elif get_origin(hint) is Union or isinstance(hint, type(int | None)):
        for part in get_args(hint):
            yield from _parts(part)
    else:
        yield hint


# ---- reading -------------------------------------------------------------------------------------------------------


class Sources(Generic[ConfigT]):
    """Collects the values of settings, the source of each (a flag, a variable, the file), and all problems.

    Read the sources in the order of their precedence, the file first, because a later value replaces an earlier one. An
    invalid value is added to `problems` and left out, so that one run finds all problems.
    """

    def __init__(self, config: type[ConfigT], environment_prefix: str) -> None:
        self._config = config
        self._prefix = environment_prefix
        self._described = {described.name: described for described in describe(config)}
        self._values: dict[str, Any] = {}
        self._sources: dict[str, str] = {}  # "--memory", "KVSTORE_SERVER_MEMORY", the file's path
        self._origins: dict[str, str] = {}  # the source and the value, for messages
        self._refused: set[str] = set()  # settings whose values are not allowed
        self.problems: list[str] = []

    def read_file(self, file: Path, named_by: str = "--config") -> None:
        """Add the values in a TOML file."""
        where = f"{named_by} {shlex.quote(str(file))}"
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            self.problems.append(f"{where}: the file cannot be read: {error.strerror}")
            return
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            self.problems.append(f"{where}: the file is not valid TOML: {error}")
            return
        self._refuse_unknown(str(file), set(values) - set(self._described), self._described)
        for name, value in values.items():
            if name in self._described:
                is_tables = self._described[name].setting.file_only
                shown = str(file) if is_tables else f"{file}: {name} = {self._shown(name, shown_in_toml(value))}"
                self._add(name, value, str(file), shown)

    def read_environment(self, environment: Mapping[str, str], others: tuple[str, ...]) -> None:
        """Add the values of variables.

        `others`: variables that have the prefix but are not settings.
        """
        names = {self._variable(name): name for name in self._described}
        given = {name for name in environment if name.startswith(self._prefix)} - set(others)
        of_tables = {name for name in given & set(names) if self._described[names[name]].setting.file_only}
        for variable in sorted(of_tables):
            self.problems.append(
                f"{variable}: no variable sets this; write [[{names[variable]}]] tables in the configuration file "
                "(--config FILE)"
            )
        known = [name for name in names if not self._described[names[name]].setting.file_only]
        self._refuse_unknown("environment", given - of_tables - set(known), [*known, *others])
        for variable in sorted(given & set(known)):
            name, value = names[variable], environment[variable]
            self._add(name, value, variable, f"{variable}={self._shown(name, shlex.quote(value))}")

    def read_flags(self, flags: Mapping[str, Any]) -> None:
        """Add the values of flags. None means that the flag was not given."""
        for name, value in flags.items():
            if value is not None:
                flag = self._described[name].flag
                if isinstance(value, bool):
                    flag = shown = flag if value else flag.replace("--", "--no-", 1)
                else:
                    shown = f"{flag} {self._shown(name, shlex.quote(str(value)))}"
                self._add(name, value, flag, shown)

    def config(self) -> ConfigT:
        """Return all settings. A setting with an invalid value has its default, and is added to the problems."""
        for name, value in list(self._values.items()):
            problem = self._problem(self._described[name], value)
            if problem:
                self.problems.append(f"{self._origins[name]}: {problem}")
                self._refused.add(name)
                del self._values[name]
        return msgspec.convert(self._values, self._config, strict=False, dec_hook=_decode)

    def add(self, misfits: Iterable[Misfit]) -> None:
        """Add misfits to the problems, with the origin of each setting. A setting whose own value was refused is left
        out, because its current value is wrong anyway."""
        for misfit in misfits:
            if misfit.name not in self._refused:
                described = self._described[misfit.name]
                origin = self._origins.get(misfit.name) or f"{described.flag} {described.default_text} (the default)"
                self.problems.append(f"{origin}: {misfit.problem}")

    def source(self, name: str) -> str:
        """Return the source of a setting's value: a flag, a variable, the path of a file, or `DEFAULT`."""
        return self._sources.get(name, DEFAULT)

    def _variable(self, name: str) -> str:
        return f"{self._prefix}{name.upper()}"

    def _shown(self, name: str, value: str) -> str:
        return _HIDDEN if self._described[name].setting.secret else value

    def _add(self, name: str, value: Any, source: str, origin: str) -> None:
        self._values[name] = value
        self._sources[name] = source
        self._origins[name] = origin

    def _problem(self, described: Described, value: Any) -> str:
        """Return why a value is not allowed; empty if it is."""
        try:
            config = msgspec.convert({described.name: value}, self._config, strict=False, dec_hook=_decode)
        except msgspec.ValidationError as error:
            return _of_table(described.name, error) if described.kind is list else described.problem
        choices = described.setting.choices
        return described.problem if choices and getattr(config, described.name) not in choices else ""

    def _refuse_unknown(self, where: str, unknown: set[str], known: Iterable[str]) -> None:
        if unknown:
            what = ", ".join(map(repr, sorted(unknown)))
            self.problems.append(f"{where}: unknown setting {what}; the settings are {', '.join(known)}")


def _decode(kind: type, value: Any) -> Any:
    """Make a `Size`, a `Portion` or a `HostPort` from a value of a file, a variable or a flag. Raises `ValueError`."""
    if isinstance(value, kind):
        return value
    if kind is Size:
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return Size(value)
        return Size(parse_size(_text(value)))
    if kind is Portion:
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else _text(value).strip()
        share = re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?)%", text, re.ASCII)
        if share is None:
            parse_size(text)
        elif float(share[1]) > 100:
            raise ValueError("more than 100 %")
        return Portion(text)
    text = _text(value)
    found = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^\[\]:]+)):(\d{1,5})", text, re.ASCII)
    if found is None or int(found[3]) > 65535 or len(found[1] or found[2]) > MAX_HOST:
        raise ValueError("not HOST:PORT")
    return HostPort(text)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"found a value of type {type(value).__name__}: expected text")
    return value


def _of_table(name: str, error: msgspec.ValidationError) -> str:
    """Describe an error in a table of the file: "[[namespaces]] number 2, priority: expected `int` <= 3"."""
    problem, _, path = str(error).partition(" - at ")
    found = re.search(r"\[(\d+)\](?:\.(\w+))?`$", path)
    number = f" number {int(found[1]) + 1}" if found else ""
    key = f", {found[2]}" if found and found[2] else ""
    return f"[[{name}]]{number}{key}: {problem[:1].lower()}{problem[1:]}"


# ---- showing -------------------------------------------------------------------------------------------------------


def shown_in_toml(value: Any) -> str:
    """Return a value in TOML notation; "..." for tables."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, dict)):
        return "..."
    if isinstance(value, (int, float)) and not isinstance(value, Size):
        return str(value)
    return msgspec.json.encode(str(value)).decode()


def listed(config: msgspec.Struct) -> dict[str, str]:
    """Return all settings, with their values as text for people."""
    return {each.name: _read_by_people(each, getattr(config, each.name)) for each in describe(type(config))}


def _read_by_people(described: Described, value: Any) -> str:
    if value is None:
        return ""
    if described.setting.secret:
        return _HIDDEN
    if isinstance(value, list):
        return f"{len(value)} table(s)"
    return str(value).lower() if isinstance(value, bool) else str(value)


def changed(config: msgspec.Struct) -> dict[str, str]:
    """Return the settings whose values differ from the defaults, as `listed` returns them."""
    default = type(config)()
    return {name: text for name, text in listed(config).items() if getattr(config, name) != getattr(default, name)}
