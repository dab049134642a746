"""Notebooks as files: their parameters, form, execution and pages. Measures nothing and knows no model."""
