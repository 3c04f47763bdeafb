"""An HTTP server for one model: `nrgpt serve`. It needs ``pip install 'nrgpt[serve]'``.

engine.py    texts that are continued together, each joining and leaving when it likes
protocol.py  what a client may ask for, and what it is told
app.py       the routes, the limits, the streams
"""
