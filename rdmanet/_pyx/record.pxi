# Records: dataclasses whose methods are compiled here.
#
# A dataclass makes its methods out of text, which Python compiles each time that the class is defined. For the records
# of the verbs, this was 10 ms of each import of rdmanet. So `dataclasses` only notes their fields, for fields(),
# replace(), asdict() and others who work with them. They inherit the methods from one of the classes below.
#
# `dataclasses` itself is imported with the first record: a connection of the byte stream has none.

cdef int import_dataclasses() except -1:
    """Before the class of a record that names it."""
    global dataclasses      # of the module, where dataclass() looks for what the text dataclasses.InitVar means
    import dataclasses
    return 0


def _record(kind):
    """Decorates the class of a record."""
    import_dataclasses()
    make_named_in(kind)
    made = dataclasses.dataclass(init=False, repr=False, eq=False)(kind)
    made._names = tuple([about.name for about in dataclasses.fields(made)])
    return made


cdef int make_named_in(kind) except -1:
    """Make what its annotations name: get_type_hints() looks only for what is made."""
    for text in kind.__annotations__.values():
        for word in re.findall(r"\w+", text):
            if word in makers:
                getattr(core, word)
    return 0


class _LateFields:
    """The fields of a record that can be made without `dataclasses`: they are noted when somebody asks for them."""

    def __get__(self, one, kind):
        return _record(kind).__dataclass_fields__


class _Signature:
    """The signature of a record, for help() and the manual; it is made when it is asked for."""

    def __get__(self, one, kind):
        import_dataclasses()
        import inspect
        missing = dataclasses.MISSING
        given = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = []
        for name, about in kind.__dataclass_fields__.items():
            default = about.default if about.default_factory is missing else about.default_factory
            if default is missing:
                default = inspect.Parameter.empty
            parameters.append(inspect.Parameter(name, given, default=default, annotation=about.type))
        return inspect.Signature(parameters)


class _Record:
    """The base of those that may be changed.

    :ivar _names: of its fields. What shows or compares a record imports nothing, which at the interpreter's end would
        fail: the warning of a resource that was not closed shows records.
    """

    __signature__ = _Signature()

    def __init__(self, *values, **named):
        import_dataclasses()
        cdef dict own = self.__dict__       # not setattr(), which frozen ones refuse
        missing = dataclasses.MISSING
        kind = type(self).__name__
        fields = self.__dataclass_fields__
        if len(values) > len(fields):
            raise TypeError(f"{kind}() takes at most {len(fields)} values, not {len(values)}")
        rest = iter(fields.items())
        for value, (name, _) in zip(values, rest):
            if name in named:
                raise TypeError(f"{kind}() got two values for {name}")
            own[name] = value
        for name, about in rest:
            if name in named:
                own[name] = named.pop(name)
            elif about.default is not missing:
                own[name] = about.default
            elif about.default_factory is not missing:
                own[name] = about.default_factory()
            else:
                raise TypeError(f"{kind}() lacks a value for {name}")
        for name in named:
            raise TypeError(f"{kind}() got an unexpected keyword argument {shown(name)}")

    def __repr__(self):
        fields = ", ".join([f"{name}={getattr(self, name)!r}" for name in self._names])
        return f"{type(self).__qualname__}({fields})"

    def __replace__(self, /, **changes):
        """For copy.replace() of Python 3.13."""
        import_dataclasses()
        return dataclasses.replace(self, **changes)

    def __eq__(self, other):
        return values_of(self) == values_of(other) if type(self) is type(other) else NotImplemented


class _FrozenRecord(_Record):
    """The base of those that may not be changed, and so can be a key."""

    def __hash__(self):
        return hash(values_of(self))

    def __setattr__(self, name, value):
        import_dataclasses()
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name):
        import_dataclasses()
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


cdef tuple values_of(one):
    return tuple([getattr(one, name) for name in one._names])
