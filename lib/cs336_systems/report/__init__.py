"""Everything that shows numbers. Reads rows, measures nothing."""
