"""Charts of a report, in the Vega-Lite grammar, each with a table of its values."""
