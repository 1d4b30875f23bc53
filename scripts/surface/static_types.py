"""Names, classes and types in Python sources. They are found in the text alone: nothing is imported or run.

`Reader` resolves names through imports, and follows expressions as far as annotations, assignments and constructors
show what they are. What they do not show is `Unknown`, never a guess. In the types of an expression, None is left out:
no types at all means that the value is None.

Not thread-safe.

Over 400 lines because the functions for names, members and expressions call each other.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol, TypeAlias

from scripts.surface.sources import FunctionNode, Module, Sources, bindings_in

Types: TypeAlias = "frozenset[Value]"

# Classes that add no attributes of interest, so that an attribute that is found nowhere is missing.
CLOSED: Final = {"object", "ABC", "Protocol", "Generic", "Struct", "NamedTuple", "Enum", "IntEnum", "StrEnum", "Flag"}
SEQUENCES: Final = (
    *("list", "List", "set", "Set", "frozenset", "FrozenSet", "Sequence", "MutableSequence", "Iterable", "Iterator"),
    *("Collection", "Generator", "deque", "KeysView", "ValuesView", "WeakSet"),
)
MAPPINGS: Final = ("dict", "Dict", "Mapping", "MutableMapping", "defaultdict", "OrderedDict", "WeakKeyDictionary")
TRANSPARENT: Final = ("Optional", "Annotated", "ClassVar", "Final", "Required", "NotRequired")
# Attributes that classes outside the sources give to the classes derived from them.
ENUMS: Final = {"Enum", "IntEnum", "StrEnum", "Flag"}
NAMES_OF: Final = {"name": ENUMS, "value": ENUMS, "register": {"ABC"}, "_replace": {"NamedTuple"}}
NONE: Final[Types] = frozenset()


# Values of expressions.


@dataclass(frozen=True)
class Class:
    """A class. One outside the sources has neither module nor node."""

    name: str
    module: Module | None = None
    node: ast.ClassDef | None = None


@dataclass(frozen=True)
class Unknown:
    """A value whose type is not known. `origin`: what it came from, after the name of its module and a colon. It is
    empty if that does not matter."""

    origin: str = ""


@dataclass(frozen=True)
class Text:
    value: str


@dataclass(frozen=True)
class Object:
    """An object of a class. `args`: the types in brackets, such as those of a container's elements."""

    of: Class
    args: tuple[Types, ...] = ()


@dataclass(frozen=True)
class ClassItself:
    of: Class


@dataclass(frozen=True)
class Super:
    """What `super()` is in a method of a class."""

    of: Class


@dataclass(frozen=True)
class Function:
    """A function or a method. `owner`: the class in which it is defined. `bound`: whether the first argument is given
    already."""

    module: Module
    node: FunctionNode
    owner: Class | None = None
    bound: Types = NONE


@dataclass(frozen=True)
class ModuleItself:
    name: str


@dataclass(frozen=True)
class External:
    """Something outside the sources, by its full name."""

    name: str

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Bound:
    """An attribute of an object of a class outside the sources."""

    of: Object
    name: str


@dataclass(frozen=True)
class Alias:
    """A name for a type with brackets, or for a choice of types."""

    module: Module
    node: ast.expr


Value: TypeAlias = Unknown | Text | Object | ClassItself | Super | Function | ModuleItself | External | Bound | Alias


def types(*values: Value) -> Types:
    return frozenset(values)


def container(name: str, *args: Types) -> Types:
    return types(Object(Class(name), args))


UNKNOWN: Final = types(Unknown())


@dataclass
class Member:
    """Where a class gets an attribute from. `method`: the method that assigns it to its first argument."""

    owner: Class
    node: ast.AST
    method: FunctionNode | None = None

    @property
    def kinds(self) -> set[str]:
        """The decorators of a method, without modules and arguments."""
        found = getattr(self.node, "decorator_list", ())
        return {ast.unparse(each).partition("(")[0].rpartition(".")[2] for each in found}

    @property
    def is_property(self) -> bool:
        return bool(self.kinds & {"property", "cached_property", "setter"})


class Listener(Protocol):
    """Gets the uses that `Reader` passes while it follows a function. `dead` of the scope: this code does not run."""

    def attribute(self, node: ast.AST, of: Types, name: str, scope: Scope, *, optional: bool) -> None: ...

    def name(self, node: ast.AST, module: str, name: str, scope: Scope) -> None: ...

    def call(self, node: ast.Call, function: Value, scope: Scope) -> None: ...


@dataclass
class Scope:
    """Where an expression is: its module and class, and the types of the function's variables."""

    module: Module
    owner: Class | None = None
    variables: dict[str, Types] = field(default_factory=dict)
    listener: Listener | None = None
    dead: bool = False
    depth: int = 0  # of branches and loops
    assigned: dict[str, Types] = field(default_factory=dict)  # attributes that the method assigns to itself

    def inner(self) -> Scope:
        return replace(self, variables=dict(self.variables))


class Reader:
    """Resolves names and follows expressions."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._names: dict[tuple[str, str], Types | None] = {}
        self._members: dict[Class, dict[str, list[Member]]] = {}
        self._mros: dict[Class, list[Class]] = {}
        self._values: dict[tuple[Class, str], Types] = {}
        self._running: set[FunctionNode] = set()  # functions whose results are being inferred

    # Names.

    def name(self, module: Module, name: str) -> Types | None:
        """Return what a module's name is; None if the module has no such name."""
        key = module.name, name
        if key not in self._names:
            self._names[key] = UNKNOWN  # for a name that is defined by itself
            self._names[key] = self._name(module, name)
        return self._names[key]

    def of_module(self, module: str, name: str) -> Types | None:
        if not self.sources.has(module):
            return types(External(f"{module}.{name}"))
        found = self.sources.module(module)
        return None if found is None else self.name(found, name)

    def _name(self, module: Module, name: str) -> Types | None:
        for node in module.bindings.get(name, ()):
            found = self._bound(module, node)
            if found is not None:
                return found
        if self.sources.module(f"{module.name}.{name}") is not None:
            return types(ModuleItself(f"{module.name}.{name}"))
        for node in module.tree.body:
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                star = module.absolute(node)
                if self.sources.has(star) and (found := self.of_module(star, name)) is not None:
                    return found
        if "__getattr__" not in module.bindings:
            return None
        texts = {each.value for each in ast.walk(module.tree) if isinstance(each, ast.Constant)}
        return types(Unknown(f"{module.name}:{name}")) if name in texts else None

    def _bound(self, module: Module, node: ast.AST) -> Types | None:
        if isinstance(node, ast.ClassDef):
            return types(ClassItself(Class(node.name, module, node)))
        if isinstance(node, FunctionNode):
            return types(Function(module, node))
        if isinstance(node, ast.alias):
            if node in module.imports:
                return self.of_module(module.imports[node], node.name)
            return types(ModuleItself(node.name if node.asname else node.name.partition(".")[0]))
        if isinstance(node, ast.AnnAssign):
            bare = ast.unparse(node.annotation).rpartition(".")[2] in ("Final", "TypeAlias")
            if not bare or node.value is None:
                return self.annotation(node.annotation, module)
        return self.infer(node.value, Scope(module))  # type: ignore[attr-defined]

    # Annotations.

    def annotation(self, node: ast.AST | None, module: Module, origin: str = "", me: Types = NONE) -> Types:
        """Return the types of a value with this annotation. `me`: the types that `Self` stands for."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        if isinstance(node, ast.Constant):
            return NONE if node.value is None else UNKNOWN
        if origin and ":" not in origin:
            origin = f"{module.name}:{origin}"
        if isinstance(node, ast.BinOp):
            return self.annotation(node.left, module, origin, me) | self.annotation(node.right, module, origin, me)
        if isinstance(node, ast.Subscript):
            return self._with_brackets(node, module, origin, me)
        if isinstance(node, ast.Name | ast.Attribute):
            found = [self._instance(value, origin, me) for value in self.infer(node, Scope(module))]
            return NONE.union(*found) if found else types(Unknown(origin))
        return types(Unknown(origin))

    def _instance(self, value: Value, origin: str, me: Types) -> Types:
        if isinstance(value, ClassItself):
            return types(Object(value.of))
        if isinstance(value, Alias):
            return self.annotation(value.node, value.module, origin, me)
        if isinstance(value, External):
            if value.last == "Self" and me:
                return me
            return types(Unknown(origin)) if value.last in ("Any", "object") else container(value.last)
        return types(Unknown(origin))

    def _with_brackets(self, node: ast.Subscript, module: Module, origin: str, me: Types) -> Types:
        base = ast.unparse(node.value).rpartition(".")[2]
        inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if base in TRANSPARENT:
            return self.annotation(inside[0], module, origin, me)
        if base == "Literal":
            return frozenset(Text(str(each.value)) for each in inside if isinstance(each, ast.Constant))
        if base == "Callable":
            return container("Callable", self.annotation(inside[-1], module, f"{origin}()" if origin else "", me))
        parts = [
            self.annotation(each, module, f"{origin}[]" if origin else "", me)
            for each in inside
            if not (isinstance(each, ast.Constant) and each.value is Ellipsis)
        ]
        if base == "Union":
            return NONE.union(*parts)
        if base in ("type", "Type"):
            return frozenset(ClassItself(each.of) for each in parts[0] if isinstance(each, Object)) or UNKNOWN
        if base in ("tuple", "Tuple"):
            return container("tuple" if len(parts) == len(inside) else "Sequence", *parts)
        whole = self.annotation(node.value, module, origin, me)
        return frozenset(replace(each, args=tuple(parts)) if isinstance(each, Object) else each for each in whole)

    # Classes.

    def mro(self, of: Class) -> list[Class]:
        """Return a class and the classes that it inherits from, in the order of a search from left to right."""
        if of not in self._mros:
            self._mros[of] = [of]
            found = [of]
            for base in of.node.bases if of.node is not None and of.module is not None else ():
                plain = base.value if isinstance(base, ast.Subscript) else base
                assert of.module is not None
                for value in self.infer(plain, Scope(of.module)):
                    if isinstance(value, ClassItself):
                        found += self.mro(value.of)
                    else:
                        found.append(Class(value.last if isinstance(value, External) else "?"))
            self._mros[of] = list(dict.fromkeys(found))
        return self._mros[of]

    def members(self, of: Class) -> dict[str, list[Member]]:
        """Return the attributes that a class itself defines, in its body and in its methods."""
        if of not in self._members:
            found: dict[str, list[Member]] = {}
            for name, node in bindings_in(of.node.body if of.node is not None else ()):
                found.setdefault(name, []).append(Member(of, node))
            for method in [each for each in (of.node.body if of.node else ()) if isinstance(each, FunctionNode)]:
                first = method.args.args[0].arg if method.args.args else ""
                for name, node in _assigned(method, first):
                    found.setdefault(name, []).append(Member(of, node, method))
            self._members[of] = found
        return self._members[of]

    def member(self, of: Class, name: str, *, above: bool = False) -> Member | None:
        """Return where a class gets an attribute from. `above`: do not look in the class itself."""
        for each in self.mro(of)[above:]:
            if found := self.members(each).get(name):
                annotated = [one for one in found if isinstance(one.node, ast.AnnAssign)]
                return (annotated or found)[0]
        return None

    def is_open(self, of: Class) -> bool:
        """Return whether a class may have attributes that do not show in the sources."""
        return any(
            (each.node is None and each.name not in CLOSED) or "__getattr__" in self.members(each)
            for each in self.mro(of)
        )

    def is_enum(self, of: Class) -> bool:
        return any(each.name in ENUMS for each in self.mro(of))

    def attribute(self, value: Value, name: str) -> Types | None:
        """Return what an attribute is; None if there is no such attribute."""
        if isinstance(value, ModuleItself):
            return self.of_module(value.name, name)
        if isinstance(value, External):
            return types(External(f"{value.name}.{name}"))
        if isinstance(value, Unknown):
            return types(value)
        if not isinstance(value, Object | ClassItself | Super):
            return UNKNOWN
        if value.of.node is None:
            return types(Bound(value, name)) if isinstance(value, Object) else UNKNOWN
        member = self.member(value.of, name, above=isinstance(value, Super))
        if member is not None:
            return self._member(member, name, value)
        external = {each.name for each in self.mro(value.of) if each.node is None}
        inherited = NAMES_OF.get(name, set()) & external or name.startswith("__")
        hidden = inherited or self.is_open(value.of)
        return types(Unknown(f"{value.of.module.name}:{value.of.name}.{name}")) if hidden else None

    def _member(self, member: Member, name: str, of: Object | ClassItself | Super) -> Types:
        node, module = member.node, member.owner.module
        me = types(Object(of.of))
        assert module is not None
        if isinstance(node, FunctionNode):
            if member.is_property:
                return self.annotation(node.returns, module, f"{member.owner.name}.{name}", me)
            static = "staticmethod" in member.kinds
            bound = not static and (not isinstance(of, ClassItself) or "classmethod" in member.kinds)
            return types(Function(module, node, member.owner, me if bound else NONE))
        if isinstance(node, ast.Assign) and member.method is None and self.is_enum(member.owner):
            return types(Object(member.owner))
        key = member.owner, name
        if key not in self._values:
            self._values[key] = UNKNOWN  # for an attribute that is assigned from itself
            self._values[key] = self._assigned_value(member, name, module)
        return self._values[key]

    def _assigned_value(self, member: Member, name: str, module: Module) -> Types:
        node, origin = member.node, f"{module.name}:{member.owner.name}.{name}"
        if isinstance(node, ast.AnnAssign):
            return self.annotation(node.annotation, module, origin)
        if member.method is None:
            return (self._bound(module, node) if isinstance(node, ast.ClassDef | ast.Assign) else None) or UNKNOWN
        scope = self.function_scope(module, member.method, member.owner)
        self.run(member.method.body, scope)
        found = scope.assigned.get(name, UNKNOWN)
        return types(Unknown(origin)) if found == UNKNOWN else found

    # Functions.

    def function_scope(
        self, module: Module, node: FunctionNode, owner: Class | None = None, listener: Listener | None = None
    ) -> Scope:
        """Return the scope of a function's body, with the types of its parameters."""
        scope = Scope(module, owner, {}, listener)
        static = any(ast.unparse(each) == "staticmethod" for each in node.decorator_list)
        plain = [*node.args.posonlyargs, *node.args.args]
        me: Types = types(Object(owner)) if owner is not None else NONE
        for index, arg in enumerate([*plain, *node.args.kwonlyargs]):
            if index == 0 and owner is not None and not static:
                of_class = any(ast.unparse(each) == "classmethod" for each in node.decorator_list)
                scope.variables[arg.arg] = types(ClassItself(owner)) if of_class else me
            else:
                scope.variables[arg.arg] = self.annotation(arg.annotation, module, f"{node.name}({arg.arg})", me)
        for several, kind in ((node.args.vararg, "Sequence"), (node.args.kwarg, "dict")):
            if several is not None:
                each = self.annotation(several.annotation, module)
                scope.variables[several.arg] = container(kind, *([UNKNOWN] if kind == "dict" else []), each)
        return scope

    def result(self, function: Function) -> Types:
        origin = f"{function.owner.name}.{function.node.name}()" if function.owner else f"{function.node.name}()"
        found = self.annotation(function.node.returns, function.module, origin, function.bound)
        returned = _returned(function.node)
        is_unknown = all(isinstance(each, Unknown) for each in found) and found
        if not is_unknown or returned is None or function.node in self._running:
            return found
        self._running.add(function.node)
        found = self.infer(returned, self.function_scope(function.module, function.node, function.owner))
        self._running.remove(function.node)
        return found

    # Statements.

    def run(self, body: Sequence[ast.stmt], scope: Scope) -> None:
        """Follow the statements of a function or a module."""
        dead = scope.dead
        for node in body:
            self._statement(node, scope)
            scope.dead = scope.dead or self._leaves(node, scope)
        scope.dead = dead

    def _statement(self, node: ast.stmt, scope: Scope) -> None:
        if isinstance(node, FunctionNode | ast.ClassDef | ast.Import | ast.ImportFrom):
            self._definition(node, scope)
        elif isinstance(node, ast.If):
            self._branches(node.test, node.body, node.orelse, scope)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            self._assignment(node, scope)
        elif isinstance(node, ast.For | ast.AsyncFor):
            self.bind(node.target, self.elements(self.infer(node.iter, scope)), scope)
            self._nested([*node.body, *node.orelse], scope)
        elif isinstance(node, ast.While):
            self.infer(node.test, scope)
            self._nested([*node.body, *node.orelse], scope)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                found = self.infer(item.context_expr, scope)
                if item.optional_vars is not None:
                    self.bind(item.optional_vars, found, scope)
            self.run(node.body, scope)
        elif isinstance(node, ast.Try):
            self._nested(node.body, scope)
            for handler in node.handlers:
                self._nested(handler.body, scope)
            self._nested([*node.orelse, *node.finalbody], scope)
        else:
            for each in ast.iter_child_nodes(node):
                if isinstance(each, ast.expr):
                    self.infer(each, scope)

    def _nested(self, body: Sequence[ast.stmt], scope: Scope) -> None:
        scope.depth += 1
        self.run(body, scope)
        scope.depth -= 1

    def _branches(self, test: ast.expr, body: Sequence[ast.stmt], orelse: Sequence[ast.stmt], scope: Scope) -> None:
        self.infer(test, scope)
        is_true, dead = self.truth(test, scope), scope.dead
        for branch, taken in ((body, True), (orelse, False)):
            scope.dead = dead or is_true is (not taken)
            self._nested(branch, scope)
        scope.dead = dead

    def _leaves(self, node: ast.stmt, scope: Scope) -> bool:
        """Return whether the statements after an `if` do not run, because the branch that runs leaves the function."""
        if not isinstance(node, ast.If) or (is_true := self.truth(node.test, scope)) is None:
            return False
        taken = node.body if is_true else node.orelse
        return bool(taken) and isinstance(taken[-1], ast.Return | ast.Raise | ast.Continue)

    def _definition(self, node: ast.stmt, scope: Scope) -> None:
        if isinstance(node, FunctionNode):
            inner = self.function_scope(scope.module, node, None, scope.listener)
            inner.variables = {**scope.variables, **inner.variables}
            inner.owner, inner.dead = scope.owner, scope.dead
            self.run(node.body, inner)
            scope.variables[node.name] = types(Function(scope.module, node))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                scope.variables[name] = self._bound(scope.module, alias) or UNKNOWN

    def _assignment(self, node: ast.Assign | ast.AnnAssign, scope: Scope) -> None:
        found = UNKNOWN if node.value is None else self.infer(node.value, scope)
        if isinstance(node, ast.AnnAssign):
            if "Final" not in ast.unparse(node.annotation):
                declared = self.annotation(node.annotation, scope.module, ast.unparse(node.target))
                found = declared if not all(isinstance(each, Unknown) for each in declared) else found or declared
            self.bind(node.target, found, scope)
        else:
            for target in node.targets:
                self.bind(target, found, scope)

    def bind(self, target: ast.AST, found: Types, scope: Scope) -> None:
        """Note what a variable, an attribute of `self`, or each of several targets is from here on."""
        if isinstance(target, ast.Name):
            before = scope.variables.get(target.id, NONE) if scope.depth else NONE
            scope.variables[target.id] = found | before
        elif isinstance(target, ast.Attribute):
            self.infer(target, scope)
            if isinstance(target.value, ast.Name) and target.value.id == "self":
                scope.assigned[target.attr] = scope.assigned.get(target.attr, NONE) | found
        elif isinstance(target, ast.Starred):
            self.bind(target.value, container("list", found), scope)
        elif isinstance(target, ast.Tuple | ast.List):
            for index, each in enumerate(target.elts):
                self.bind(each, self._at(found, index, len(target.elts)), scope)
        else:
            self.infer(target, scope)  # type: ignore[arg-type]

    def _at(self, found: Types, index: int, of: int) -> Types:
        fixed = [
            each for each in found if isinstance(each, Object) and each.of.name == "tuple" and len(each.args) == of
        ]
        return NONE.union(*(each.args[index] for each in fixed)) if fixed else self.elements(found)

    # Whether a test is true with these sources.

    def truth(self, test: ast.expr, scope: Scope) -> bool | None:
        """Return whether a test is true in every process with these sources, or false in every process. Return None if
        the sources do not show it."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.truth(test.operand, scope)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            decides = isinstance(test.op, ast.Or)
            found = [self.truth(each, scope) for each in test.values]
            return decides if decides in found else None if None in found else not decides
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return self._comparison(test.left, test.ops[0], test.comparators[0], scope)
        if isinstance(test, ast.Call):
            return self._truth_of_call(test, scope)
        if isinstance(test, ast.Name) and test.id not in scope.variables:
            return self._constant(test.id, scope.module)
        return None

    def _truth_of_call(self, test: ast.Call, scope: Scope) -> bool | None:
        scope = replace(scope.inner(), listener=None)  # the test itself is followed elsewhere
        given = [self.infer(each, scope) for each in test.args]
        if ast.unparse(test.func) == "hasattr":
            return self._has(given[0], given[1])
        named = self._named(test, given, scope)
        if named is not None:
            is_true = named and all(isinstance(each, ClassItself | Function) for each in named)
            return True if is_true else None if named else False
        for function in self.infer(test.func, scope):
            if isinstance(function, Function) and (returned := _returned(function.node)) is not None:
                return self.truth(returned, self.function_scope(function.module, function.node, function.owner))
        return None

    def _comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr, scope: Scope) -> bool | None:
        if isinstance(op, ast.Is | ast.IsNot) and isinstance(right, ast.Constant) and right.value is None:
            inner = self.truth(left, scope)
            return None if inner is None else inner is isinstance(op, ast.IsNot)
        if isinstance(op, ast.In) and isinstance(right, ast.Attribute) and right.attr.startswith("__"):
            return self._has(self.infer(right.value, scope), self.infer(left, scope))
        return None

    def _has(self, of: Types, names: Types) -> bool | None:
        if len(of) != 1 or len(names) != 1:
            return None
        [value], [name] = of, names
        if not isinstance(name, Text):
            return None
        if isinstance(value, ClassItself | ModuleItself):
            return self.attribute(value, name.value) is not None
        if not isinstance(value, Object) or value.of.module is None or self.is_open(value.of):
            return None
        if self.member(value.of, name.value) is not None:
            return True
        # The object may be of a derived class that has the attribute. Such classes are usually in the same module.
        others = [
            Class(each.name, value.of.module, each)
            for each in value.of.module.tree.body
            if isinstance(each, ast.ClassDef)
        ]
        return None if any(value.of in self.mro(other)[1:] for other in others) else False

    def _constant(self, name: str, module: Module) -> bool | None:
        """Return whether a constant of a module is true."""
        for node in module.bindings.get(name, ()):
            if isinstance(node, ast.alias) and node in module.imports:
                source = self.sources.module(module.imports[node])
                return self._constant(node.name, source) if source is not None else None
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                return self.truth(node.value, Scope(module))
        return None

    # Expressions.

    def infer(self, node: ast.AST, scope: Scope) -> Types:
        """Return the types of an expression. The scope's listener gets all uses in it."""
        found = getattr(self, f"_of_{type(node).__name__}", None)
        if found is not None:
            return found(node, scope)  # type: ignore[no-any-return]
        for each in ast.iter_child_nodes(node):
            if isinstance(each, ast.expr | ast.keyword | ast.FormattedValue):
                self.infer(each, scope)
        return UNKNOWN

    def _of_Constant(self, node: ast.Constant, scope: Scope) -> Types:
        if isinstance(node.value, str):
            return types(Text(node.value))
        return NONE if node.value is None else container(type(node.value).__name__)

    def _of_Name(self, node: ast.Name, scope: Scope) -> Types:
        if node.id in scope.variables:
            return scope.variables[node.id]
        found = self.name(scope.module, node.id)
        if found is None:
            return types(External(f"builtins.{node.id}")) if hasattr(builtins, node.id) else UNKNOWN
        return found

    def _of_Attribute(self, node: ast.Attribute, scope: Scope) -> Types:
        of = self.infer(node.value, scope)
        if scope.listener is not None:
            scope.listener.attribute(node, of, node.attr, scope, optional=False)
        found = [each for value in of if (each := self.attribute(value, node.attr)) is not None]
        return NONE.union(*found) if found else UNKNOWN

    def _of_Starred(self, node: ast.Starred, scope: Scope) -> Types:
        return self.elements(self.infer(node.value, scope))

    def _of_NamedExpr(self, node: ast.NamedExpr, scope: Scope) -> Types:
        found = self.infer(node.value, scope)
        self.bind(node.target, found, scope)
        return found

    def _of_IfExp(self, node: ast.IfExp, scope: Scope) -> Types:
        self.infer(node.test, scope)
        is_true, dead, found = self.truth(node.test, scope), scope.dead, NONE
        for branch, taken in ((node.body, True), (node.orelse, False)):
            scope.dead = dead or is_true is (not taken)
            found |= self.infer(branch, scope)
        scope.dead = dead
        return found

    def _of_BoolOp(self, node: ast.BoolOp, scope: Scope) -> Types:
        dead, found, ends = scope.dead, NONE, isinstance(node.op, ast.Or)
        for each in node.values:
            found |= self.infer(each, scope)
            scope.dead = scope.dead or self.truth(each, scope) is ends
        scope.dead = dead
        return found

    def _of_BinOp(self, node: ast.BinOp, scope: Scope) -> Types:
        left, right = self.infer(node.left, scope), self.infer(node.right, scope)
        if isinstance(node.op, ast.BitOr) and any(
            isinstance(each, ClassItself | Alias | External) for each in left | right
        ):
            return types(Alias(scope.module, node))
        return left if isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Sub | ast.Add) else UNKNOWN

    def _of_Lambda(self, node: ast.Lambda, scope: Scope) -> Types:
        inner = scope.inner()
        for arg in node.args.args:
            inner.variables[arg.arg] = UNKNOWN
        return container("Callable", self.infer(node.body, inner))

    def _of_Subscript(self, node: ast.Subscript, scope: Scope) -> Types:
        of = self.infer(node.value, scope)
        self.infer(node.slice, scope)
        if any(isinstance(each, External | ClassItself) for each in of):
            return types(Alias(scope.module, node))
        if isinstance(node.slice, ast.Slice):
            return of
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int):
            fixed = [each for each in of if isinstance(each, Object) and each.of.name == "tuple"]
            if fixed and all(-len(each.args) <= node.slice.value < len(each.args) for each in fixed):
                return NONE.union(*(each.args[node.slice.value] for each in fixed))
        return NONE.union(*(self._item(each) for each in of))

    def _item(self, of: Value) -> Types:
        if isinstance(of, Object) and of.of.name in MAPPINGS and len(of.args) == 2:
            return of.args[1]
        if isinstance(of, Object) and of.of.node is not None and (found := self.attribute(of, "__getitem__")):
            return NONE.union(*(self.result(each) for each in found if isinstance(each, Function)))
        return self.elements(types(of))

    def elements(self, of: Types) -> Types:
        """Return what an iteration over an object gives."""
        found = NONE
        for each in of:
            if isinstance(each, Object) and each.of.node is not None:
                method = self.attribute(each, "__iter__") or NONE
                results = [self.result(one) for one in method if isinstance(one, Function)]
                found |= self.elements(NONE.union(*results)) if results else UNKNOWN
            elif isinstance(each, Object) and each.args and each.of.name in (*SEQUENCES, *MAPPINGS, "tuple"):
                found |= NONE.union(*each.args) if each.of.name == "tuple" else each.args[0]
            else:
                found |= types(each) if isinstance(each, Unknown) else UNKNOWN
        return found

    def _literal(self, node: ast.List | ast.Set, scope: Scope) -> Types:
        return container("list", NONE.union(*(self.infer(each, scope) for each in node.elts)))

    _of_List = _of_Set = _literal

    def _of_Tuple(self, node: ast.Tuple, scope: Scope) -> Types:
        found = [self.infer(each, scope) for each in node.elts]
        if any(isinstance(each, ast.Starred) for each in node.elts):
            return container("Sequence", NONE.union(*found))
        return container("tuple", *found)

    def _of_Dict(self, node: ast.Dict, scope: Scope) -> Types:
        keys = [self.infer(each, scope) for each in node.keys if each is not None]
        return container("dict", NONE.union(*keys), NONE.union(*(self.infer(each, scope) for each in node.values)))

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, scope: Scope) -> Types:
        inner = scope.inner()
        inner.depth = 0
        for each in node.generators:
            self.bind(each.target, self.elements(self.infer(each.iter, inner)), inner)
            for test in each.ifs:
                self.infer(test, inner)
        if isinstance(node, ast.DictComp):
            return container("dict", self.infer(node.key, inner), self.infer(node.value, inner))
        return container("list", self.infer(node.elt, inner))

    _of_ListComp = _of_SetComp = _of_GeneratorExp = _of_DictComp = _comprehension

    # Calls.

    def _of_Call(self, node: ast.Call, scope: Scope) -> Types:
        functions = self.infer(node.func, scope)
        given = [self.infer(each, scope) for each in node.args]
        for keyword in node.keywords:
            self.infer(keyword.value, scope)
        named = self._named(node, given, scope)
        if named is not None:
            return named
        found = NONE
        for function in functions:
            if scope.listener is not None:
                scope.listener.call(node, function, scope)
            found |= self._called(function, node, given, scope)
        return found

    def _named(self, node: ast.Call, given: Sequence[Types], scope: Scope) -> Types | None:
        """Return what a call gives that names a module, or a module and a name in it, by texts."""
        texts = [value.value for each in given if len(each) == 1 for value in each if isinstance(value, Text)]
        if len(texts) != len(given) or not texts or not self.sources.has(texts[0]):
            return None
        if len(texts) == 1 and ast.unparse(node.func) in ("importlib.import_module", "sys.modules.get"):
            return types(ModuleItself(texts[0]))
        if len(texts) != 2 or not all(part.isidentifier() for part in ".".join(texts).split(".")):
            return None
        if scope.listener is not None:
            scope.listener.name(node, *texts, scope)
        return self.of_module(*texts) or NONE

    def _called(self, function: Value, node: ast.Call, given: Sequence[Types], scope: Scope) -> Types:
        if isinstance(function, ClassItself):
            return types(Object(function.of))
        if isinstance(function, Function):
            return self.result(function)
        if isinstance(function, Unknown):
            return types(function)
        if isinstance(function, Object) and function.of.name == "Callable" and function.args:
            return function.args[-1]
        if isinstance(function, Object) and function.of.node is not None:
            found = self.attribute(function, "__call__") or NONE
            return NONE.union(*(self.result(each) for each in found if isinstance(each, Function))) or UNKNOWN
        if isinstance(function, Bound):
            return self._container_method(function, given)
        if isinstance(function, External):
            special = getattr(self, f"_call_{function.last}", None)
            if special is not None and (given or function.last == "super"):
                return special(node, given, scope)  # type: ignore[no-any-return]
        return UNKNOWN

    def _container_method(self, method: Bound, given: Sequence[Types]) -> Types:
        args = method.of.args
        if method.of.of.name in MAPPINGS and len(args) == 2:
            if method.name == "items":
                return container("list", container("tuple", *args))
            if method.name in ("keys", "values"):
                return container("list", args[method.name == "values"])
            if method.name in ("get", "pop", "setdefault"):
                return args[1].union(*given[1:])
        if method.name in ("pop", "popleft"):
            return self.elements(types(method.of))
        return types(method.of) if method.name in ("copy", "union", "difference", "intersection") else UNKNOWN

    def _same_elements(self, node: ast.Call, given: Sequence[Types], scope: Scope) -> Types:
        return container("list", self.elements(given[0]))

    _call_list = _call_tuple = _call_set = _call_frozenset = _call_sorted = _call_reversed = _same_elements

    def _call_enumerate(self, node: ast.Call, given: Sequence[Types], scope: Scope) -> Types:
        return container("list", container("tuple", container("int"), self.elements(given[0])))

    def _call_zip(self, node: ast.Call, given: Sequence[Types], scope: Scope) -> Types:
        return container("list", container("tuple", *map(self.elements, given)))

    def _call_chain(self, node: ast.Call, given: Sequence[Types], scope: Scope) -> Types:
        return container("list", NONE.union(*map(self.elements, given)))

    def _call_super(self, node: ast.Call, given: Sequence[Types], scope: Scope) -> Types:
        return types(Super(scope.owner)) if scope.owner is not None else UNKNOWN

    def _call_NewType(self, node: ast.Call, given: Sequence[Types], scope: Scope) -> Types:
        return frozenset(ClassItself(Class(each.value)) for each in given[0] if isinstance(each, Text))

    def _call_isinstance(self, node: ast.Call, given: Sequence[Types], scope: Scope) -> Types:
        """From here on, the tested variable may also be of the tested class."""
        variable = node.args[0].target if isinstance(node.args[0], ast.NamedExpr) else node.args[0]
        tested = self.elements(given[1]) if isinstance(node.args[1], ast.Tuple) else given[1]
        found = frozenset(Object(each.of) for each in tested if isinstance(each, ClassItself))
        if isinstance(variable, ast.Name) and found:
            before = scope.variables.get(variable.id, NONE)
            scope.variables[variable.id] = found | frozenset(each for each in before if not isinstance(each, Unknown))
        return UNKNOWN

    def _call_hasattr(self, node: ast.Call, given: Sequence[Types], scope: Scope) -> Types:
        self._optional(node, given, scope)
        return UNKNOWN

    def _call_getattr(self, node: ast.Call, given: Sequence[Types], scope: Scope) -> Types:
        names = [each.value for each in given[1] if isinstance(each, Text)]
        if len(given) > 2:
            self._optional(node, given, scope)
        elif scope.listener is not None:
            for name in names:
                scope.listener.attribute(node, given[0], name, scope, optional=False)
        found = [self.attribute(value, name) for value in given[0] for name in names]
        is_certain = names and all(isinstance(value, ClassItself | ModuleItself) for value in given[0])
        return NONE.union(*(each or NONE for each in found), *given[2:], NONE if is_certain else UNKNOWN)

    def _optional(self, node: ast.Call, given: Sequence[Types], scope: Scope) -> None:
        for name in given[1]:
            if scope.listener is not None and isinstance(name, Text):
                scope.listener.attribute(node, given[0], name.value, scope, optional=True)


def _returned(node: FunctionNode) -> ast.expr | None:
    """Return what a function returns that does nothing else; None for another function."""
    last = node.body[-1]
    is_short = len(node.body) == 1 + (ast.get_docstring(node) is not None)
    return last.value if is_short and isinstance(last, ast.Return) else None


def _assigned(method: FunctionNode, first: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield the attributes that a method assigns to its first argument, with the statements."""
    for node in ast.walk(method):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in [each for one in targets for each in (one.elts if isinstance(one, ast.Tuple) else [one])]:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == first:
                yield target.attr, node
