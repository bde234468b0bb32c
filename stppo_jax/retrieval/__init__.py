"""Retrievers: queries in, passages out.

protocol.py  the interface
kinds.py     retrievers by name
bm25.py      search by words
dense.py     search by vectors, which encoder.py computes
http.py      the client of a retrieval server
server.py    such a server
"""
