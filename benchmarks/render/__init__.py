"""Makes tables, charts and the ledger of targets from results, as described by data.

`cells` has the rows of a result, and the templates that make their texts. `tables` has rows and columns, `charts` has
bars, lines and panels, and `ledger` has targets and verdicts. A benchmark's descriptions are in `tables`, `charts` and
`claims` in the benchmark's folder.
"""
