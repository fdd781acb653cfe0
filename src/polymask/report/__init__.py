"""Reports: figures, tables, self-contained HTML pages, model cards. Made of records, without torch."""
