"""The table of papers agrees with the claims of the records."""

import json

from experiments.cli import paper_table, results_page
from jaxkv.report import Claim


def test_every_figure_has_either_claims_or_a_reason() -> None:
    paths = results_page.RECORDS.glob("*/claims.json")
    claims = [Claim(**x) for path in paths for x in json.loads(path.read_text("utf-8"))]
    papers = paper_table.list_papers({"all": claims})
    claimed = {
        (next(x.source for x in papers if claim.source.startswith(x.source)), label)
        for claim in claims
        if claim.kind in ("reproduces", "recomputes", "cannot compare")
        for label in paper_table.figure_labels(claim.source)
    }
    rows = {(x.source, row.label): row for x in papers for row in x.rows}
    assert {key for key, row in rows.items() if row.status != "not tried"} == claimed
    assert all(row.note for row in rows.values() if row.status == "not tried")
    page = paper_table.render_papers(papers)
    assert page.count("\n| figure") + page.count("\n| table") == len(rows)


def test_claims_give_the_status_of_a_figure() -> None:
    holds = Claim("", "", 1.0, 1.0, "1", 0.0, "holds", "equal", "", "reproduces")
    fails = holds._replace(verdict="fails")
    skipped = holds._replace(verdict="not judged")
    differs = holds._replace(kind="cannot compare", verdict="differs")
    opposed = differs._replace(direction="fails")
    judge = paper_table.judge_figure
    assert judge([holds, opposed]) == ("reproduced", "")
    assert judge([holds, fails]) == ("partly", "")
    assert judge([fails, skipped, differs]) == ("not", "")
    assert judge([skipped, holds._replace(kind="checks")]) == ("not tried", "")
    assert judge([differs, opposed]) == ("cannot be compared", "direction fails")
    formula = holds._replace(kind="recomputes")
    assert judge([formula, differs]) == ("recomputed", "")
    assert judge([formula, holds]) == ("reproduced", "")
