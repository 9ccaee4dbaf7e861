"""Images of rows: cells and files that hold them, tables of them, and how one was made from another."""
