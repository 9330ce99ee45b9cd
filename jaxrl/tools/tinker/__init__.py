"""A training service with Tinker's API: many adapters of one base, trained and sampled at once.

wire/ bodies.py   what travels, and what it may be
app.py server.py  the routes
journal.py        what was asked, before it is answered; nothing else must not be lost
service.py        the calls of all models, in turns
losses.py         the API's losses, on `jaxrl.losses`
tiles.py          data of a call, in rows of one shape
tenants.py        adapters, gradients and moments on the devices, and the two programs
"""
