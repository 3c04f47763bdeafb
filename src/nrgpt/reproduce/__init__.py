"""The paper's figures and tables, from training to pictures: what `nrgpt reproduce` does.

Each experiment is a file with a list of cases (a name, a configuration, labels) and a function that
draws from records. ``common.py`` carries the cases out and keeps one record of each, all of them in
one file (``records.py``); pictures and tables are made from the records alone, so they can be made
again anywhere.
"""
