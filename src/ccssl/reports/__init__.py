"""Reports: what runs have left behind, as figures, words and one page that needs nothing from outside."""
