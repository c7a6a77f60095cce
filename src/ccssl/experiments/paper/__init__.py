"""The paper's tables and figures as data: what they show, what was printed, and the runs that they need.

J. Lienen, C. Demir, E. Huellermeier: Conformal credal self-supervised learning. COPA 2023.
"""
