"""Settings that are described once: a msgspec struct whose fields are `Annotated` with a `Setting`.

From that description come a command's flags, the variables, the keys of the TOML file, the error messages, the
commented file that `--print-config` writes, and the table in docs/operations.md. A setting has the same name
everywhere: field and key `log_level`, flag `--log-level`, variable `KVSTORE_SERVER_LOG_LEVEL`. A flag wins over a
variable, a variable over the file, the file over the default.
"""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from kvstore.sizes import parse_size, spell_size

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_HOST: Final = 255
_COMMENT_WIDTH: Final = 98  # of the comments in the TOML file

ConfigT = TypeVar("ConfigT", bound=msgspec.Struct)


class ConfigError(Exception):
    """The settings cannot be used. The message says which setting, where it came from, and what is expected."""


class Misfit(ConfigError):
    """A setting is valid by itself but does not fit the others."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.name = name
        self.problem = problem


class Size(int):
    """A number of bytes, written like 4GiB."""

    def __str__(self) -> str:
        return spell_size(self)


class Portion(str):
    """A part of another size: a percentage of it, or a number of bytes."""

    def of(self, whole: int) -> int:
        """-> the bytes of it."""
        return int(whole * float(self[:-1]) / 100) if self.endswith("%") else parse_size(self)


class HostPort(str):
    """An address to listen on: HOST:PORT or [IPv6]:PORT."""

    @classmethod
    def of(cls, host: str, port: int) -> HostPort:
        """-> the address of a host and a port."""
        return cls(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")

    @property
    def host(self) -> str:
        """The host, without brackets."""
        return self.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port; 0: any free port."""
        return int(self.rpartition(":")[2])


@dataclass(frozen=True)
class Setting:
    """The description of a setting beside its name, type, bounds and default."""

    section: str
    help: str  # one or more sentences for an operator
    value: str = ""  # the placeholder of the value in the help: SECONDS, FOLDER
    choices: tuple[str, ...] = ()
    unset: str = ""  # the meaning of a default of None: "no disk tier"
    more: str = ""  # page and anchor in docs/ with more about it
    file_only: bool = False  # tables of the file; they have no flag and no variable
    example: str = ""  # for `file_only`: the content of an example table


@dataclass(frozen=True)
class Described:
    """One setting with its name, type, default, bounds and description."""

    name: str
    kind: type  # int, bool, str, Size, HostPort; list for tables of the file
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
    """-> all settings of a struct, in order."""
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
    """Collects the values of settings and the origin of each: a flag, a variable, the file, or the default.

    Read sources in the order of their precedence, the file first: a later value replaces an earlier one.
    """

    def __init__(self, config: type[ConfigT], environment_prefix: str) -> None:
        self._config = config
        self._prefix = environment_prefix
        self._described = {described.name: described for described in describe(config)}
        self._values: dict[str, Any] = {}
        self._origins: dict[str, str] = {}

    def read_file(self, file: Path, named_by: str = "--config") -> None:
        """Add the values in a TOML file. Raises `ConfigError`."""
        where = f"{named_by} {shlex.quote(str(file))}"
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{where}: the file cannot be read: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: the file is not valid TOML: {error}") from None
        self._refuse_unknown(str(file), set(values) - set(self._described), self._described)
        for name, value in values.items():
            is_tables = self._described[name].setting.file_only
            self._add(name, value, str(file) if is_tables else f"{file}: {name} = {_shown(value)}")

    def read_environment(self, environment: Mapping[str, str], others: tuple[str, ...]) -> None:
        """Add the values of variables. Raises `ConfigError`.

        others: variables that have the prefix but are no settings.
        """
        names = {self._variable(name): name for name in self._described}
        given = {name for name in environment if name.startswith(self._prefix)} - set(others)
        for variable in sorted(given):
            described = self._described.get(names.get(variable, ""))
            if described is not None and described.setting.file_only:
                raise ConfigError(
                    f"{variable}: no variable sets this; write [[{described.name}]] tables in the configuration file "
                    "(--config FILE)"
                )
        known = [name for name in names if not self._described[names[name]].setting.file_only]
        self._refuse_unknown("environment", given - set(known), [*known, *others])
        for variable in given:
            value = environment[variable]
            self._add(names[variable], value, f"{variable}={shlex.quote(value)}")

    def read_flags(self, flags: Mapping[str, Any]) -> None:
        """Add the values of flags. None means that the flag was not given."""
        for name, value in flags.items():
            if value is not None:
                flag = self._described[name].flag
                shown = f"{flag} {shlex.quote(str(value))}"
                if isinstance(value, bool):
                    shown = flag if value else flag.replace("--", "--no-", 1)
                self._add(name, value, shown)

    def config(self) -> ConfigT:
        """-> all settings. Raises `ConfigError` for a value that is not allowed."""
        for name, value in self._values.items():
            self._check(self._described[name], value)
        return msgspec.convert(self._values, self._config, strict=False, dec_hook=_decode)

    def error(self, misfit: Misfit) -> ConfigError:
        """-> the error of a setting that does not fit the others, with the setting's origin."""
        described = self._described[misfit.name]
        origin = self._origins.get(misfit.name) or f"{described.flag} {described.default_text} (the default)"
        return ConfigError(f"{origin}: {misfit.problem}")

    def _variable(self, name: str) -> str:
        return f"{self._prefix}{name.upper()}"

    def _add(self, name: str, value: Any, origin: str) -> None:
        self._values[name] = value
        self._origins[name] = origin

    def _check(self, described: Described, value: Any) -> None:
        origin = self._origins[described.name]
        try:
            config = msgspec.convert({described.name: value}, self._config, strict=False, dec_hook=_decode)
        except msgspec.ValidationError as error:
            problem = _of_table(described.name, error) if described.kind is list else described.problem
            raise ConfigError(f"{origin}: {problem}") from None
        choices = described.setting.choices
        if choices and getattr(config, described.name) not in choices:
            raise ConfigError(f"{origin}: {described.problem}")

    def _refuse_unknown(self, where: str, unknown: set[str], known: Any) -> None:
        if unknown:
            what = ", ".join(map(repr, sorted(unknown)))
            raise ConfigError(f"{where}: unknown setting {what}; known are {', '.join(known)}")


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
        raise ValueError(f"{type(value).__name__} instead of text")
    return value


def _of_table(name: str, error: msgspec.ValidationError) -> str:
    """Describe an error in a table of the file: "[[namespaces]] number 2, priority: expected `int` <= 3"."""
    problem, _, path = str(error).partition(" - at ")
    found = re.search(r"\[(\d+)\](?:\.(\w+))?`$", path)
    number = f" number {int(found[1]) + 1}" if found else ""
    key = f", {found[2]}" if found and found[2] else ""
    return f"[[{name}]]{number}{key}: {problem[:1].lower()}{problem[1:]}"


# ---- writing -------------------------------------------------------------------------------------------------------


def _shown(value: Any) -> str:
    """-> a value in TOML notation; "..." for tables."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, dict)):
        return "..."
    if isinstance(value, (int, float)) and not isinstance(value, Size):
        return str(value)
    return msgspec.json.encode(str(value)).decode()


def to_toml(config: msgspec.Struct, heading: str) -> str:
    """-> all settings as a TOML file with comments. Reading the file gives `config` again."""
    lines = _comment(heading)
    section = ""
    described = describe(type(config))
    for each in sorted(described, key=lambda each: each.setting.file_only):  # tables have to come last
        if each.setting.section != section:
            section = each.setting.section
            lines += ["", f"# ---- {section} ".ljust(_COMMENT_WIDTH + 2, "-")]
        value = getattr(config, each.name)
        if each.setting.file_only:
            lines += ["", *_comment(each.setting.help), *_tables(each, value)]
        else:
            bounds = "" if each.kind in (str, bool) and not each.setting.choices else f" Expected: {each.expected}."
            lines += ["", *_comment(f"{each.setting.help}{bounds} Default: {each.default_text}.")]
            lines.append(f"# {each.name} = {_shown(each.value)}" if value is None else f"{each.name} = {_shown(value)}")
    return "\n".join([*lines, ""])


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, _COMMENT_WIDTH)]


def _tables(described: Described, rows: list[msgspec.Struct]) -> list[str]:
    if not rows:
        return [f"# {line}" for line in (f"[[{described.name}]]", *described.setting.example.splitlines())]
    lines = []
    for row in rows:
        lines.append(f"[[{described.name}]]")
        lines += [f"{key} = {_shown(value)}" for key, value in msgspec.structs.asdict(row).items()]
    return lines


def listed(config: msgspec.Struct) -> dict[str, str]:
    """-> all settings, with their values as text for people."""
    return {each.name: _read_by_people(getattr(config, each.name)) for each in describe(type(config))}


def _read_by_people(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return f"{len(value)} table(s)"
    return str(value).lower() if isinstance(value, bool) else str(value)


def changed(config: msgspec.Struct) -> dict[str, str]:
    """-> the settings whose values are not the defaults, as `listed` gives them."""
    default = type(config)()
    return {name: text for name, text in listed(config).items() if getattr(config, name) != getattr(default, name)}
