"""Pages for a browser, each one file that needs no network.

Files:

    page                    the templates, and where a page may be written
    inspect_page            one checkpoint, or the commits of a folder
    checkpoint_page         the sections about one checkpoint
    sharding_pictures       the boxes of an array that ranks wrote
    treemap                 tensors by size
    sweep_page              the jobs of a sweep
    sweep_advice            what its figures support
"""
