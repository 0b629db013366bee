"""What the elements of a value are, known from sizes alone: formulas in an element's indices, for every size.

Enters: nodes of a program. Leaves: for each node whose elements depend on no input and no parameter a formula: of
booleans a `Predicate`, of numbers `Numbers`. What it does not know it says nothing of; what it says is proved.
"""
