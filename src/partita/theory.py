"""The mathematics has a package of its own; this file says so to code that looks for it here."""

_NAMES = (
    *("contrast", "geometry", "information", "law", "layer", "robustness", "selection", "sharpness", "spectrum"),
    *("InformationBound", "mutual_information_bound"),
)
raise AttributeError(
    "partita.theory is a package of its own, partita_theory (pip install partita-theory). It has "
    f"{', '.join(f'partita_theory.{name}' for name in _NAMES)}; partita.mutual_information_bound and "
    "partita.scale.critical_scale are in partita itself."
)
