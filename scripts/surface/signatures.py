"""Signatures of functions in Python sources, and whether calls and overriding methods fit them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from scripts.surface.sources import FunctionNode

Signature = inspect.Signature


class _Plain(str):
    """A text that a signature shows without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def text_of(annotation: ast.expr) -> _Plain:
    return _Plain(annotation.value if isinstance(annotation, ast.Constant) else ast.unparse(annotation))


def signature(node: FunctionNode) -> Signature:
    """Return a function's signature. Annotations and defaults are texts."""
    args, kinds, empty = node.args, inspect.Parameter, inspect.Parameter.empty
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)

    def parameter(arg: ast.arg, kind: Any, default: ast.expr | None = None) -> inspect.Parameter:
        return kinds(
            arg.arg,
            kind,
            default=empty if default is None else _Plain(ast.unparse(default)),
            annotation=empty if arg.annotation is None else text_of(arg.annotation),
        )

    found = [
        parameter(arg, kinds.POSITIONAL_ONLY if arg in args.posonlyargs else kinds.POSITIONAL_OR_KEYWORD, default)
        for arg, default in zip(plain, defaults, strict=True)
    ]
    found += [parameter(args.vararg, kinds.VAR_POSITIONAL)] if args.vararg else []
    found += [
        parameter(arg, kinds.KEYWORD_ONLY, default)
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    found += [parameter(args.kwarg, kinds.VAR_KEYWORD)] if args.kwarg else []
    returns = Signature.empty if node.returns is None else text_of(node.returns)
    return Signature(found, return_annotation=returns)


def without_first(of: Signature) -> Signature:
    return of.replace(parameters=list(of.parameters.values())[1:])


def misfit(of: Signature, positional: int, keywords: Iterable[str]) -> str | None:
    """Return why a call does not fit a signature; None if it fits."""
    try:
        of.bind(*range(positional), **dict.fromkeys(keywords))
    except TypeError as error:
        return str(error)
    return None


def not_accepted(base: Signature, ours: Signature) -> str | None:
    """Return why a method of ours does not fit all calls that fit the method of the base class; None if it does."""
    kinds = inspect.Parameter
    parameters = base.parameters.values()
    plain = [each for each in parameters if each.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    named = [each for each in parameters if each.kind is kinds.KEYWORD_ONLY]
    by_name = [each for each in plain if each.kind is not kinds.POSITIONAL_ONLY and not each.name.startswith("_")]
    for all_of_them in (False, True):

        def given(some: Sequence[inspect.Parameter], every: bool = all_of_them) -> set[str]:
            return {each.name for each in some if every or each.default is kinds.empty}

        found = misfit(ours, len(given(plain)), given(named))
        if found is None and len(by_name) == len(plain):
            found = misfit(ours, 0, given([*named, *by_name]))
        if found is not None:
            return found
    rest = {each.kind for each in parameters} - {each.kind for each in ours.parameters.values()}
    return "it has no **arguments" if kinds.VAR_KEYWORD in rest else None


def kind_of(node: FunctionNode) -> str:
    """Return what must stay the same about a function, besides its parameters: class method, coroutine ..."""
    kinds = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
    found = sorted(kinds & {"classmethod", "staticmethod"})
    return " ".join([*found, "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"])


def unlike(base: ast.AST, ours: ast.AST) -> str | None:
    """Return why a method of ours cannot stand for a method of a base class; None if it can."""
    if not isinstance(base, FunctionNode):
        return None
    is_property = any("property" in ast.unparse(each) for each in base.decorator_list)
    if not isinstance(ours, FunctionNode):
        return None if is_property else "expected a method"
    if is_property or kind_of(base) != kind_of(ours):
        ours_too = any("property" in ast.unparse(each) for each in ours.decorator_list)
        return None if is_property and ours_too else f"expected a {'property' if is_property else kind_of(base)}"
    first = "staticmethod" not in kind_of(base)
    return not_accepted(*((without_first(signature(each)) if first else signature(each)) for each in (base, ours)))


def fields_of(node: ast.ClassDef) -> Iterator[inspect.Parameter]:
    """Yield the parameters that the fields of a data class give its constructor."""
    options = [
        *node.keywords,
        *(each for one in node.decorator_list if isinstance(one, ast.Call) for each in one.keywords),
    ]
    kinds = inspect.Parameter
    for each in node.body:
        if not isinstance(each, ast.AnnAssign) or not isinstance(each.target, ast.Name):
            continue
        called = each.value.keywords if isinstance(each.value, ast.Call) else []
        given = {one.arg: ast.unparse(one.value) for one in called}
        if "ClassVar" in ast.unparse(each.annotation) or given.get("init") == "False":
            continue
        by_name = given.get("kw_only") == "True" or any(
            one.arg == "kw_only" and ast.unparse(one.value) == "True" for one in options
        )
        required = each.value is None or (called and not given.keys() & {"default", "default_factory"})
        yield kinds(
            each.target.id,
            kinds.KEYWORD_ONLY if by_name else kinds.POSITIONAL_OR_KEYWORD,
            default=kinds.empty if required else _Plain("..."),
            annotation=text_of(each.annotation),
        )
