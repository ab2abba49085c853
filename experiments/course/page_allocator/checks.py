"""Checks of the page allocator: tables are compared with a simulated memory."""

from types import ModuleType
from typing import Any

_ALLOCATORS: list[Any] = []


def drive_constructor(solution: ModuleType, num_pages: int, page_size: int) -> None:
    """Creates the allocator, in the process of the solution."""
    _ALLOCATORS[:] = [solution.PageAllocator(num_pages, page_size)]


def drive_operation(
    solution: ModuleType, method: str, arguments: list, names: list[str]
) -> dict[str, Any]:
    """Calls a method; returns its result, the tables of sequences and free pages."""
    [allocator] = _ALLOCATORS
    result = getattr(allocator, method)(*arguments)
    if method == "append" and result is not None:
        names = sorted({*names, arguments[0]})
    tables = {name: list(allocator.table(name)) for name in names}
    return {"result": result, "tables": tables, "num_free": allocator.num_free()}


def check_walks(process: Any, walks: list[tuple[str, int, int]]) -> str:
    """Replays walks of operations, the shortest first, up to the first violation."""
    violations = (_check_walk(process, *walk) for walk in walks)
    return next(filter(None, violations), "")


def _check_walk(process: Any, operations: str, num_pages: int, page_size: int) -> str:
    process.call("constructor", num_pages, page_size)
    script = f"PageAllocator({num_pages}, page_size={page_size})"
    memory = [[""] * page_size for _ in range(num_pages)]
    tokens: dict[str, list[str]] = {}
    tables: dict[str, list[int]] = {}
    for operation in operations.split(";"):
        method, *words = operation.split()
        arguments: list[Any] = [int(x) if x.isdigit() else x for x in words]
        is_new = arguments[-1] not in tables if method == "fork" else True
        if method != "append" and (arguments[0] not in tables or not is_new):
            continue  # possible in a random walk
        script += f"; {method}({', '.join(map(repr, arguments))})"
        name = arguments[-1] if method == "fork" else arguments[0]
        before = tables
        names = {*tables, name} if method == "fork" else {*tables}
        names -= {name} if method == "release" else set()
        try:
            answer = process.call("operation", method, arguments, sorted(names))
        except ValueError as error:  # without an answer
            return f"After {script}: {error}"
        tables = answer["tables"]
        free = answer["num_free"]
        violation = ""
        if method == "append":
            violation = _check_append(
                answer, before, tokens, memory, (name, arguments[1], page_size)
            )
        elif method == "fork":
            tokens[name] = list(tokens[arguments[0]])
            if tables[name] != before[arguments[0]]:
                violation = (
                    f"the child's table {tables[name]} must be its parent's, "
                    f"{before[arguments[0]]}: a fork shares all pages"
                )
        else:
            del tokens[name]
        for other in before.keys() & tables.keys() - {name}:
            if not violation and tables[other] != before[other]:
                violation = (
                    f"the table of {other!r} was {before[other]} and is now "
                    f"{tables[other]}: do two sequences share one list?"
                )
        violation = violation or _check_state(tables, tokens, memory, free, page_size)
        if violation:
            return f"After {script}: {violation}."
    return ""


def _check_append(
    answer: dict[str, Any],
    before: dict[str, list[int]],
    tokens: dict[str, list[str]],
    memory: list[list[str]],
    request: tuple[str, int, int],
) -> str:
    """Checks an `append`, and writes its tokens into the memory."""
    name, num_tokens, page_size = request
    copies = answer["result"]
    length = len(tokens.get(name, []))
    old = before.get(name, [])
    sharers = [x for x, table in before.items() if x != name and old[-1:] == table[-1:]]
    sharers = [x for x in sharers if len(before[x]) == len(old)]
    must_copy = bool(length % page_size and sharers)
    num_new = -(-(length + num_tokens) // page_size) - len(old) + must_copy
    num_free = len(memory) - len({page for table in before.values() for page in table})
    needs = f"the new pages needed, copies included, are {num_new} of {num_free} free"
    if num_new > num_free:
        if copies is not None:
            return f"append returned {copies}, but {needs}: it must return None"
        return (
            ""
            if answer["tables"] == before and answer["num_free"] == num_free
            else f"append returned None, but changed the state: the tables were "
            f"{before} with {num_free} free pages, and are {answer['tables']} with "
            f"{answer['num_free']}. A refused append is all or nothing"
        )
    if copies is None:
        return f"append returned None, but {needs}"
    table = answer["tables"][name]
    if len(table) != len(old) + num_new - must_copy:
        return (
            f"{name!r} has {length + num_tokens} tokens, {page_size} to a page, and "
            f"its table is {table}"
        )
    if must_copy and (len(copies) != 1 or copies[0][0] != old[-1]):
        return (
            f"token {length} of {name!r} belongs on page {old[-1]}, which "
            f"{' and '.join(sharers)} holds too, and append returned the copies "
            f"{copies}: a shared page must be copied before it is written "
            "(copy-on-write)"
        )
    if copies and not must_copy:
        return f"append copies {copies}, but no other sequence holds a written page"
    for source, destination in copies:
        memory[destination] = list(memory[source])
    tokens[name] = [*tokens.get(name, [])]
    for position in range(length, length + num_tokens):
        token = f"token {position} of {name!r}"
        memory[table[position // page_size]][position % page_size] = token
        tokens[name].append(token)
    return ""


def _check_state(
    tables: dict[str, list[int]],
    tokens: dict[str, list[str]],
    memory: list[list[str]],
    num_free: int,
    page_size: int,
) -> str:
    """Checks that the memory has the tokens of all sequences, and counts pages."""
    held = {page for table in tables.values() for page in table}
    if not held <= {*range(len(memory))}:
        return f"the tables are {tables}, but the pages are 0 to {len(memory) - 1}"
    for name, content in tokens.items():
        for position, token in enumerate(content):
            page = tables[name][position // page_size]
            if (stored := memory[page][position % page_size]) != token:
                return (
                    f"page {page}, which holds {token} for {name!r}, contains {stored}:"
                    " the page was written or reused while a sequence held it"
                )
    if num_free != len(memory) - len(held):
        return (
            f"the tables {tables} hold {len(held)} of {len(memory)} pages, so "
            f"{len(memory) - len(held)} are free, but num_free() returns {num_free}: a "
            "page is free if and only if no table names it"
        )
    return ""
