"""Results become tables, charts and the ledger of targets, from descriptions that are data.

`cells`: a row of a result, and the templates that make text of it; `tables`: rows and columns; `charts`: bars, lines
and panels; `ledger`: targets and verdicts. What is shown of a benchmark stands beside it, in its folder's `tables`,
`charts` and `claims`.
"""
