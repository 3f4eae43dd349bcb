"""Claims: each method's headline, restated as an experiment that anyone can run (`acclimate bench NAME`).

`base` says what a claim is and how its verdict is computed; `table` writes docs/claims.md from the committed evidence;
every other module is the claim of the method of that name.
"""
