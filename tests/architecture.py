"""The rules of the house, as questions to the source: each yields what breaks it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any

Scope = dict[str, ast.expr]
Function = ast.FunctionDef | ast.AsyncFunctionDef

MAX_LINES = 400
MAX_FUNCTION = 45

WRITES = {
    *("update", "aupdate", "bulk_update", "abulk_update", "update_or_create"),
    *("aupdate_or_create", "delete", "adelete", "_raw_delete", "save", "asave"),
    # Statements made once (``jobqueue.db``).
    *("Update", "UpdateEach", "UpdateChosen"),
}
# What a chain of calls may begin with, and write: other tables, Python's own containers, a verb.
NO_JOBS = {"Worker", "JobEvent", "Queue", "{}", "Counter", "transitions"}
RAW_WRITE = re.compile(r"\b(UPDATE|DELETE\s+FROM|INSERT\s+INTO)\W+jobqueue_job\b", re.IGNORECASE)

IDS_IN = {"pk__in", "id__in", "job__in", "job_id__in"}
EXPLICIT = {"sorted", "list", "tuple", "set", "[]"}

SENDS = {"send", "asend", "send_robust", "asend_robust"}

VENDORS = re.compile(r"sqlite|postgres|psycopg|mysql|mariadb|oracle", re.IGNORECASE)
VENDOR_ATTRIBUTES = {"vendor", "mysql_is_mariadb", "sqlstate"}


# -- one rule each


def writes(source: str) -> Iterator[str]:
    """Yield writes that may hit a job: all that don't begin with another table."""
    for node, scope in walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and RAW_WRITE.search(str(node.value)):
            yield at(node, f"raw SQL: {node.value!r:.40}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            root = root_of(node.func.value, scope)
            if node.func.attr in WRITES and root not in NO_JOBS:
                yield at(node, f".{node.func.attr}() on {root}")


def queries_as_ids(source: str) -> Iterator[str]:
    """Yield ``pk__in=`` of anything but explicit values: only an outer WHERE is rechecked."""
    for node, scope in walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg in IDS_IN:
            value = resolved(node.value, dict(scope))
            maker = value.func if isinstance(value, ast.Call) else value
            if not (isinstance(maker, ast.Name) and maker.id in EXPLICIT) and not isinstance(
                value, ast.List | ast.Tuple | ast.Set | ast.ListComp | ast.SetComp
            ):
                yield at(node.value, f"{node.arg}={ast.unparse(node.value)}")


def settings_reads(source: str) -> Iterator[str]:
    """Yield reads of the project's JOBQUEUE dict."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr == "JOBQUEUE":
            yield at(node, "settings.JOBQUEUE")
        if isinstance(node, ast.Constant) and node.value == "JOBQUEUE":
            yield at(node, "'JOBQUEUE'")


def vendor_knowledge(source: str) -> Iterator[str]:
    """Yield names of engines, and attributes that tell one from another."""
    tree = ast.parse(source)
    docs = {id(node) for node in docstrings(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in VENDOR_ATTRIBUTES:
            yield at(node, f".{node.attr}")
        if isinstance(node, ast.Import | ast.ImportFrom) and VENDORS.search(ast.unparse(node)):
            yield at(node, ast.unparse(node))
        if isinstance(node, ast.Constant) and id(node) not in docs:
            yield from (at(node, repr(name)) for name in VENDORS.findall(str(node.value)))


def lazy_imports(source: str) -> Iterator[str]:
    """Yield imports inside functions."""
    for function in functions(ast.parse(source)):
        for node in ast.walk(function):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield at(node, f"{function.name}: {ast.unparse(node)}")


def sent_signals(source: str) -> Iterator[str]:
    """Yield signals that are sent: only ``signals`` does, so that one place says when and how."""
    for node, scope in walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute) or node.attr not in SENDS:
            continue
        if node.attr.endswith("robust") or root_of(node, scope) == "signals":
            yield at(node, ast.unparse(node))


def missing_docstrings(source: str) -> Iterator[str]:
    """Yield the module, and its public functions and classes, where they have no docstring."""
    tree = ast.parse(source)
    if source.strip() and not ast.get_docstring(tree):
        yield "1: the module"
    defined = (node for node in tree.body if isinstance(node, Function | ast.ClassDef))
    for node in defined:
        if not node.name.startswith("_") and not ast.get_docstring(node):
            yield at(node, node.name)


def too_long(source: str) -> Iterator[str]:
    """Yield the file, and its functions, where they have too many lines."""
    if (lines := source.count("\n")) > MAX_LINES:
        yield f"1: {lines} lines"
    for function in functions(ast.parse(source)):
        lines = length(function)
        if ast.get_docstring(function):
            lines -= length(function.body[0])
        if lines > MAX_FUNCTION:
            yield at(function, f"{function.name} has {lines} lines")


RULES: dict[str, Callable[[str], Iterator[str]]] = {
    rule.__name__: rule
    for rule in (
        writes,
        queries_as_ids,
        settings_reads,
        vendor_knowledge,
        lazy_imports,
        sent_signals,
        missing_docstrings,
        too_long,
    )
}


# -- reading source


def at(node: Any, text: str) -> str:
    """Return what was found with its line."""
    return f"{node.lineno}: {text}"


def length(node: Any) -> int:
    """Return how many lines a node takes."""
    return int(node.end_lineno - node.lineno + 1)


def functions(tree: ast.AST) -> Iterator[Function]:
    """Yield every function and method."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def docstrings(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield every string that stands alone: docstrings of modules, classes and functions."""
    return (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))


def walk(tree: ast.AST, outer: Scope | None = None) -> Iterator[tuple[ast.AST, Scope]]:
    """Yield every node with what the names around it were last given."""
    scope = dict(outer or {})
    for node in own_nodes(tree):
        for target, value in given(node):
            if isinstance(target, ast.Name):
                scope[target.id] = value
    for node in own_nodes(tree):
        yield node, scope
        if node is not tree and isinstance(node, Function | ast.Lambda):
            inner = {name: value for name, value in scope.items() if name not in parameters(node)}
            yield from walk(node, inner)


def own_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of one scope: functions in it, but not what is inside them."""
    waiting = list(ast.iter_child_nodes(tree))
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, Function | ast.Lambda):
            waiting = [*ast.iter_child_nodes(node), *waiting]


def parameters(function: Any) -> set[str]:
    """Return the names that a call gives values to."""
    return {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}


def given(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the targets that a node gives values to, with the values."""
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value:
        yield node.target, node.value
    elif isinstance(node, ast.For | ast.comprehension):
        yield node.target, node.iter


def resolved(expression: ast.expr, scope: Scope) -> ast.expr:
    """Return what a name was last given, or the expression itself; each name is used up."""
    while isinstance(expression, ast.Name) and expression.id in scope:
        expression = scope.pop(expression.id)
    return expression


def root_of(expression: ast.expr, scope: Scope) -> str:
    """Return what a chain of attributes and calls begins with."""
    scope = dict(scope)
    while True:
        expression = resolved(expression, scope)
        if isinstance(expression, ast.Attribute | ast.Subscript):
            expression = expression.value
        elif isinstance(expression, ast.Call):
            expression = expression.func
        elif isinstance(expression, ast.Dict | ast.Set | ast.DictComp | ast.SetComp):
            return "{}"
        else:
            return expression.id if isinstance(expression, ast.Name) else ast.unparse(expression)
