"""What this project uses of vLLM, as far as the sources of both show it.

Over 400 lines because one class follows all kinds of uses.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from scripts.surface.signatures import (
    Signature,
    fields_of,
    kind_of,
    misfit,
    signature,
    text_of,
    unlike,
    without_first,
)
from scripts.surface.sources import FunctionNode, Module, Sources
from scripts.surface.static_types import (
    Alias,
    Class,
    ClassItself,
    Function,
    Member,
    ModuleItself,
    Object,
    Reader,
    Scope,
    Super,
    Text,
    Types,
    Unknown,
    Value,
)

ROOT = Path(__file__).resolve().parents[2]
USERS, TESTS = "kvstore_client/vllm", "tests/engine"
VLLM: Final = "vllm"
# The module whose look-ups count everywhere. Look-ups in another module count only there.
RELEASES: Final = "kvstore_client.vllm.shared.releases"
# A function that makes one of vLLM's messages without the fields that a release lacks.
MAKES_MESSAGES: Final = "made"
# Interfaces of vLLM that a class of ours has without inheriting them.
INTERFACES: Final = {"WeightsEndpoint": ("vllm.plugins.endpoint_plugins.interface", "EndpointPlugin")}
# Hooks that earlier releases do not call, with the first release that does.
SINCE: Final = {
    "KVConnectorBase_V1.get_external_cache_hit_sources": (0, 32),
    "KVConnectorBase_V1.get_transfer_results": (0, 30),
    "KVConnectorBase_V1.has_pending_block_frees": (0, 30),
    "SecondaryTierManager.cache_hit_source": (0, 32),
}
# Bases of classes whose fields are the parameters of their constructors.
HAVE_FIELDS: Final = {"object", "ABC", "Generic", "Protocol", "Struct", "NamedTuple"}
HOOK: Final = " (hook)"
UNUSED: Final = "not used with this release"


@dataclass(frozen=True)
class Problem:
    """Something that a release lacks.

    why: what else is known about it.
    handled: why this breaks nothing; None if it breaks something.
    optional: whether the code only looks for it.
    """

    places: list[str]
    why: str
    handled: str | None
    optional: bool


@dataclass
class Surface:
    """What the project uses of one release. Texts describe signatures and types.

    names: by module. members: by class. hooks: the methods that vLLM calls and the project has, by base class. others:
    the other methods of these base classes. calls: the parameters of the classes that the project makes.
    not_followed: what the project uses of values whose types vLLM does not show.
    """

    release: str
    names: dict[str, dict[str, str]] = field(default_factory=dict)
    members: dict[str, dict[str, str]] = field(default_factory=dict)
    hooks: dict[str, dict[str, str]] = field(default_factory=dict)
    others: dict[str, list[str]] = field(default_factory=dict)
    calls: dict[str, str] = field(default_factory=dict)
    not_followed: dict[str, list[str]] = field(default_factory=dict)

    def as_json(self) -> str:
        fields = {**asdict(self), "others": {of: sorted(names) for of, names in self.others.items()}}
        return json.dumps(fields, indent=1, sort_keys=True) + "\n"

    def flat(self) -> dict[str, str]:
        """Return the texts by the full names."""
        return {
            **{f"{module}.{name}": text for module, names in self.names.items() for name, text in names.items()},
            **{f"{of}.{name}": text for of, names in self.members.items() for name, text in names.items()},
            **{f"{of}.{name}{HOOK}": text for of, names in self.hooks.items() for name, text in names.items()},
            **{f"{name}()": text for name, text in self.calls.items()},
        }


def described(found: Types) -> str:
    """Return the text of types."""
    texts = set()
    for each in found:
        if isinstance(each, Object):
            inside = ", ".join(described(arg) for arg in each.args)
            texts.add(f"{each.of.name}[{inside}]" if inside else each.of.name)
        elif isinstance(each, ClassItself):
            texts.add("class")
        elif isinstance(each, Function):
            texts.add(f"{kind_of(each.node)}{signature(each.node)}")
        elif isinstance(each, Text):
            texts.add(repr(each.value))
        else:
            texts.add({ModuleItself: "module", Alias: "a type"}.get(type(each), "?"))
    return " | ".join(sorted(texts)) or "None"


class Uses:
    """Collects what the project uses of one release. It is the listener of its `Reader`."""

    def __init__(self, vllm: Path, *, root: Path = ROOT, tests: bool = False) -> None:
        """`vllm`: a wheel, or a folder with the package. `root`: the project. `tests`: whether problems of the
        engine tests are collected, too."""
        packages = [each.name for each in root.iterdir() if each.is_dir() and any(each.glob("*.py"))]
        self._sources = Sources({**dict.fromkeys(packages, root), VLLM: vllm})
        self._reader = Reader(self._sources)
        self.surface = Surface(release_of(self._sources, vllm))
        # Names that the project looks for: the module that does, the class or module of vLLM, and the name.
        self._looked_up: set[tuple[str, str, str]] = set()
        self.unused: set[str] = set()  # attributes that the project does not use with this release
        self._gone: dict[str, list[_Use]] = defaultdict(list)
        self._derived: dict[Class, list[Class]] = defaultdict(list)  # classes of ours, by class of vLLM
        self._unknown: dict[str, set[str]] = defaultdict(set)
        self._refusing: set[str] = set()  # packages whose class does not work with this release, and says so
        self._follow_all(root, USERS)
        self.surface.not_followed = {
            origin.rpartition(":")[2]: sorted(names)
            for origin, names in self._unknown.items()
            if _is_vllm(origin) or "(" in origin.replace("()", "")
        }
        if tests:
            surface, self.surface = self.surface, Surface(self.surface.release)
            self._follow_all(root, TESTS)
            self.surface = surface

    def _follow_all(self, root: Path, folder: str) -> None:
        files = [file.relative_to(root).with_suffix("") for file in sorted((root / folder).rglob("*.py"))]
        names = [".".join(file.parts).removesuffix(".__init__") for file in files]
        modules = [module for name in names if (module := self._sources.module(name)) is not None]
        self._refusing |= {package_of(module) for module in modules if self._refuses(module)}
        for module in modules:
            self._follow(module)

    def _refuses(self, module: Module) -> bool:
        """Return whether the constructor of a class in this module always raises an error with this release, because a
        feature of vLLM is missing."""
        for of in [Class(node.name, module, node) for node in module.tree.body if isinstance(node, ast.ClassDef)]:
            init = self._reader.member(of, "__init__")
            if init is not None and init.owner == of and isinstance(init.node, FunctionNode):
                scope = self._reader.function_scope(module, init.node, of)
                for node in [each for each in init.node.body if isinstance(each, ast.If)]:
                    if isinstance(node.body[-1], ast.Raise) and self._reader.truth(node.test, scope):
                        return True
        return False

    def _is_unused(self, scope: Scope) -> bool:
        return scope.dead or package_of(scope.module) in self._refusing

    @property
    def problems(self) -> dict[str, Problem]:
        """What the release lacks, by name."""
        return {what: self._problem(uses) for what, uses in self._gone.items()}

    def _problem(self, uses: Sequence[_Use]) -> Problem:
        reasons = {use: use.handled or self._looked(use) for use in uses}
        hurts = [use for use, reason in reasons.items() if not reason]
        places = list(dict.fromkeys(use.place for use in hurts or uses))
        handled = None if hurts else "; ".join(sorted(set(reasons.values())))
        return Problem(places, uses[0].why, handled, all(use.optional for use in uses))

    def _looked(self, use: _Use) -> str:
        found = any(self.is_looked_up(of, use.name, module) for of in use.of for module in (use.module, RELEASES))
        return "looked up" if found else ""

    def is_looked_up(self, of: str, name: str, module: str = RELEASES) -> bool:
        """Return whether a module of the project looks for a name of a class or of a module."""
        return (module, of, name) in self._looked_up

    def _follow(self, module: Module) -> None:
        reader = self._reader
        for node in ast.walk(module.tree):
            for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
                if isinstance(node, ast.ImportFrom):
                    self.name(node, module.absolute(node), alias.name, Scope(module))
                elif "." in alias.name:
                    self.name(node, *alias.name.rsplit(".", 1), Scope(module))
        for node in module.tree.body:
            if isinstance(node, FunctionNode):
                reader.run(node.body, reader.function_scope(module, node, None, self))
            elif isinstance(node, ast.ClassDef):
                self._follow_class(Class(node.name, module, node), node)
            else:
                reader.run([node], Scope(module, None, {}, self))

    def _follow_class(self, of: Class, node: ast.ClassDef) -> None:
        assert of.module is not None
        self._hooks(of, self._reader.mro(of))
        if of.name in INTERFACES:
            where, name = INTERFACES[of.name]
            self.name(node, where, name, Scope(of.module))
            for each in self._reader.of_module(where, name) or ():
                if isinstance(each, ClassItself):
                    self._hooks(of, self._reader.mro(each.of))
        body = [each for each in node.body if not isinstance(each, FunctionNode)]
        self._reader.run(body, Scope(of.module, of, {}, self))
        for each in node.body:
            if isinstance(each, FunctionNode):
                scope = self._reader.function_scope(of.module, each, of, self)
                scope.dead = self._is_later_hook(of, each.name)
                self._reader.run(each.body, scope)

    def _is_later_hook(self, of: Class, name: str) -> bool:
        """Return whether only later releases call this method."""
        return any(
            name not in self._reader.members(base) and is_before(f"{base.name}.{name}", self.surface.release)
            for base in self._reader.mro(of)
        )

    # Hooks: methods of vLLM's classes that a class of ours overrides.

    def _hooks(self, of: Class, mro: Sequence[Class]) -> None:
        """Note the hooks of a class of ours. `mro`: the classes with the hooks."""
        bases = list(filter(_is_of_vllm, mro))
        seen: set[str] = set()
        for base in bases:
            self._derived[base].append(of)
            for name, [member, *_] in self._reader.members(base).items():
                if name in seen or member.method is not None or (name.startswith("_") and name != "__init__"):
                    continue
                seen.add(name)
                ours = self._reader.member(of, name)
                if ours is None or ours.owner in bases or ours.method is not None:
                    self.surface.others.setdefault(base.name, []).append(name)
                    if "abstractmethod" in member.kinds:
                        self._lose_hook(base, name, of, of.node, "new abstract method")
                else:
                    self.surface.hooks.setdefault(base.name, {})[name] = self._member_text(member, name)
                    if (why := unlike(member.node, ours.node)) is not None:
                        self._lose_hook(base, name, of, ours.node, f"{of.name}.{name}: {why}")

    # What the reader notes.

    def attribute(self, node: ast.AST, of: Types, name: str, scope: Scope, *, optional: bool) -> None:
        found = [self._reader.attribute(value, name) is not None for value in of]
        if self._is_unused(scope):
            self.unused.add(name)
        for value in of:
            if isinstance(value, ModuleItself):
                self.name(node, value.name, name, scope, optional=optional)
            elif isinstance(value, Unknown) and value.origin:
                self._unknown[value.origin].add(name)
            elif isinstance(value, Object | ClassItself | Super) and value.of.node is not None:
                bases = [each.name for each in filter(_is_of_vllm, self._reader.mro(value.of))]
                if optional:
                    self._looked_up |= {(scope.module.name, base, name) for base in bases}
                member = self._reader.member(value.of, name, above=isinstance(value, Super))
                hooks = self.surface.hooks.get(member.owner.name, {}) if member is not None else {}
                if member is not None and _is_of_vllm(member.owner) and name not in hooks:
                    self.surface.members.setdefault(member.owner.name, {})[name] = self._member_text(member, name)
                elif member is None and bases and not any(found) and not self._derived_has(value, name):
                    self._lose(f"{bases[0]}.{name}", bases, name, node, scope, optional=optional)

    def _derived_has(self, value: Object | ClassItself | Super, name: str) -> bool:
        """Return whether a value may be of a class of ours that has this attribute."""
        derived = () if isinstance(value, Super) else self._derived[value.of]
        return any(self._reader.member(each, name) is not None for each in derived)

    def name(self, node: ast.AST, module: str, name: str, scope: Scope, *, optional: bool = False) -> None:
        # Elsewhere than in RELEASES, a call with the two names raises an error if the name is missing.
        if not _is_vllm(module):
            return
        optional = optional or (isinstance(node, ast.Call) and scope.module.name == RELEASES)
        if optional:
            self._looked_up.add((scope.module.name, module, name))
        found = self._reader.of_module(module, name)
        if found is None:
            why = "" if optional else self._elsewhere(name)
            self._lose(f"{module}.{name}", [module], name, node, scope, why, optional=optional)
        else:
            self.surface.names.setdefault(module, {})[name] = described(found)

    def call(self, node: ast.Call, function: Value, scope: Scope) -> None:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "register" and node.args:
            self._registration(node, scope)
        keywords = {each.arg for each in node.keywords if each.arg is not None}
        positional = [each for each in node.args if not isinstance(each, ast.Starred)]
        if len(keywords) < len(node.keywords) or len(positional) < len(node.args):
            return
        if isinstance(function, Function) and _is_vllm(function.module.name):
            of = signature(function.node)
            of = without_first(of) if function.bound else of
            what = f"{function.owner.name}.{function.node.name}" if function.owner else function.node.name
        elif isinstance(function, ClassItself) and _is_of_vllm(function.of):
            of, what = self._made(function.of), function.of.name
        elif isinstance(function, Function) and function.node.name == MAKES_MESSAGES and node.args:
            self._message(node, keywords, scope)
            return
        else:
            return
        if of is not None and (why := misfit(of, len(positional), keywords)) is not None:
            self._lose(f"{what}()", [], what, node, scope, why)

    def _made(self, of: Class) -> Signature | None:
        """Return the parameters of a class that the project makes, and note them."""
        found = self._constructor(of)
        if found is not None:
            self.surface.calls[of.name] = str(found)
        return found

    def _message(self, node: ast.Call, keywords: set[str], scope: Scope) -> None:
        """Note a message that is made without the fields that a release lacks."""
        for each in self._reader.infer(node.args[0], Scope(scope.module)):
            of = self._made(each.of) if isinstance(each, ClassItself) else None
            if isinstance(each, ClassItself) and of is not None:
                what = each.of.name
                for name in sorted(keywords - of.parameters.keys()):
                    self._lose(f"{what}.{name}", [], name, node, scope, handled=f"{MAKES_MESSAGES}() leaves it out")
                if (why := misfit(of, 0, keywords & of.parameters.keys())) is not None:
                    self._lose(f"{what}()", [], what, node, scope, why)

    def _registration(self, node: ast.Call, scope: Scope) -> None:
        """Note the hooks of a class of ours that counts as derived from a class of vLLM."""
        assert isinstance(node.func, ast.Attribute)
        for base in self._reader.infer(node.func.value, Scope(scope.module)):
            for ours in self._reader.infer(node.args[0], Scope(scope.module)):
                if isinstance(base, ClassItself) and isinstance(ours, ClassItself):
                    self._hooks(ours.of, self._reader.mro(base.of))

    def _constructor(self, of: Class) -> Signature | None:
        """Return the parameters of a class. Return None if they do not show."""
        member = self._reader.member(of, "__init__")
        if member is not None and isinstance(member.node, FunctionNode):
            return without_first(signature(member.node))
        fields: dict[str, inspect.Parameter] = {}
        for each in reversed(self._reader.mro(of)):
            if each.node is None and each.name not in HAVE_FIELDS:
                return None
            for parameter in fields_of(each.node) if each.node is not None else ():
                fields[parameter.name] = parameter
        order = sorted(fields.values(), key=lambda each: (each.kind, each.default is not each.empty))
        return Signature(order)

    def _member_text(self, member: Member, name: str) -> str:
        node = member.node
        if isinstance(node, FunctionNode):
            if member.is_property:
                return "?" if node.returns is None else text_of(node.returns)
            return f"{kind_of(node)}{signature(node)}"
        if isinstance(node, ast.AnnAssign):
            return text_of(node.annotation)
        if member.method is None:
            return ast.unparse(getattr(node, "value", node))
        return described(self._reader.attribute(Object(member.owner), name) or Types())

    # What the release lacks.

    def _lose(
        self,
        what: str,
        of: Sequence[str],
        name: str,
        node: ast.AST,
        scope: Scope,
        why: str = "",
        *,
        handled: str = "",
        optional: bool = False,
    ) -> None:
        place = f"{scope.module.file}:{node.lineno}"  # type: ignore[attr-defined]
        handled = handled or (UNUSED if self._is_unused(scope) else "")
        self._gone[what].append(_Use(tuple(of), name, scope.module.name, place, why, handled, optional))

    def _lose_hook(self, base: Class, name: str, of: Class, node: ast.AST | None, why: str) -> None:
        assert node is not None and of.module is not None
        self._lose(f"{base.name}.{name}", [], name, node, Scope(of.module), why)

    def _elsewhere(self, name: str) -> str:
        """Return where a name is now that is no longer where the project looks for it."""
        pattern = re.compile(rf"^(class|def|async def) {name}\b|^{name}\b.* = ", re.MULTILINE)
        files = self._sources.files(VLLM)
        found = [file for file in files if pattern.search(self._sources.text(VLLM, file) or "")]
        return f"it is in {', '.join(found[:3])}" if found else ""


@dataclass(frozen=True)
class _Use:
    """A use of something that a release lacks.

    of: the class of vLLM and the classes that it inherits from, or the module, that lacks the name. It is empty if
        looking for the name does not help.
    module, place: where the use is.
    handled: why it breaks nothing, if that is known already.
    """

    of: tuple[str, ...]
    name: str
    module: str
    place: str
    why: str
    handled: str
    optional: bool


def package_of(module: Module) -> str:
    return module.name.rpartition(".")[0]


def _is_vllm(module: str) -> bool:
    return re.match(rf"{VLLM}\b", module) is not None


def _is_of_vllm(of: Class) -> bool:
    return of.module is not None and _is_vllm(of.module.name)


def release_of(sources: Sources, vllm: Path) -> str:
    """Return the number of the release. Ends the process if this is not vLLM."""
    text = sources.text(VLLM, f"{VLLM}/_version.py") or ""
    found = re.search(r"^(?:__version__ = )?version = '([^']+)'", text, re.MULTILINE)
    if found is None:
        raise SystemExit(f"{vllm}: expected a wheel of vLLM, or a folder that contains vllm/_version.py")
    return found[1]


def is_before(hook: str, release: str) -> bool:
    """Return whether this release is older than the first one with this hook."""
    number = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    return hook in SINCE and number < SINCE[hook]
