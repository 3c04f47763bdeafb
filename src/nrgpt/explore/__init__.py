"""The explorer: a page on which one types a text and watches its tokens roll downhill.

static/ is the page: its engine (arrays.js, engine.js), what it draws, and how it behaves.
weights.py writes a model down for the engine, page.py puts everything into one file, server.py
serves it for models that are too large for a page.
"""
