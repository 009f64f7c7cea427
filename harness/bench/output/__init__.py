"""Results of a bench: records, tables, charts, pages."""
