"""Everything that shows numbers: plots, tables, answers. Reads rows, measures nothing."""
