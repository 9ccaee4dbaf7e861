"""A small invented world as a corpus for search without a network: its articles, their generator and a BM25 index."""
