"""The paper's figures and tables, from training to pictures: what `nrgpt reproduce` does.

Each experiment is a module with a list of cases (a name, a configuration, labels) and a function
that makes figures and tables. ``common.py`` trains the cases and keeps a record of each, all in one
file (``records.py``). Figures and tables need only the records, so they can be made again anywhere.
"""
