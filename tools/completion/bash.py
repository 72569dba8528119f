"""The completion script for bash: tables of the commands, and one function that reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tools.completion.tree import CommandTree, Value

FUNCTIONS = r"""
# Print the suggestions for a value: $1 its kind or its choices, the rest the words of the command.
_tidegate_values() {
    case $1 in
    '' | @) ;;
    @file) compgen -f -- "$_tidegate_word" ;;
    @directory) compgen -d -- "$_tidegate_word" ;;
    @model)
        compgen -W "$("${COMP_WORDS[0]}" completion values model 2>/dev/null)" -- "$_tidegate_word"
        compgen -f -X '!*.gguf' -- "$_tidegate_word"
        compgen -d -- "$_tidegate_word"
        ;;
    @*)
        compgen -W "$("${COMP_WORDS[0]}" completion values "${1#@}" "${@:2}" 2>/dev/null)" \
            -- "$_tidegate_word"
        ;;
    *) compgen -W "$1" -- "$_tidegate_word" ;;
    esac
}

_tidegate() {
    # bash also splits words at = and :, so the words are read from the line.
    local line=${COMP_LINE:0:COMP_POINT} words name='' option='' next kind place=0
    local _tidegate_word=${line##*[[:space:]]}
    COMPREPLY=()
    read -ra words <<<"${line%"$_tidegate_word"}"
    words=("${words[@]:1}")
    local arguments=()
    for next in "${words[@]}"; do
        if [[ -n $option ]]; then
            option=''
        elif [[ $next == -* ]]; then
            [[ -n ${_tidegate_value["$name $next"]+x} ]] && option=$next
        elif [[ " ${_tidegate_commands["$name."]} " == *" $next "* && $place == 0 ]]; then
            name=${name:+$name }$next
        else
            place=$((place + 1))
            arguments+=("$next")
        fi
    done
    local typed=$_tidegate_word
    if [[ -n $option ]]; then
        kind=${_tidegate_value["$name $option"]}
    elif [[ $typed == --*=* ]]; then
        kind=${_tidegate_value["$name ${typed%%=*}"]}
        _tidegate_word=${typed#*=}
    elif [[ $typed == -* ]]; then
        kind=${_tidegate_options["$name."]}
    else
        local kinds=${_tidegate_arguments["$name."]}
        read -ra kinds <<<"$kinds"
        kind=${kinds[place]-}
        if [[ -z $kind && ${kinds[*]} == *... ]]; then kind=${kinds[-1]}; fi
        kind=${kind%...}
        [[ $kind == @* || -z $kind ]] || kind=${kind//,/ }
        [[ $place == 0 ]] && mapfile -t COMPREPLY < <(
            compgen -W "${_tidegate_commands["$name."]}" -- "$_tidegate_word"
        )
    fi
    local found
    mapfile -t found < <(_tidegate_values "$kind" "${arguments[@]}" | sort -u)
    COMPREPLY+=("${found[@]}")
    case $kind in @file | @directory | @model) compopt -o filenames 2>/dev/null ;; esac
    # readline replaces only what follows the last = or :.
    if [[ $_tidegate_word == *:* && $COMP_WORDBREAKS == *:* ]]; then
        COMPREPLY=("${COMPREPLY[@]#"${_tidegate_word%"${_tidegate_word##*:}"}"}")
    fi
}

complete -F _tidegate tidegate
"""


def script(tree: Sequence[CommandTree]) -> str:
    return "\n".join([*_tables(tree), FUNCTIONS])


def _tables(tree: Sequence[CommandTree]) -> Iterator[str]:
    yield "# bash completion for tidegate, made by `tidegate completion bash`."
    yield "declare -gA _tidegate_commands _tidegate_options _tidegate_arguments _tidegate_value"
    for each in tree:
        name = each.name
        names = [option for each_option in each.options for option in each_option.names]
        yield f'_tidegate_commands["{name}."]="{" ".join(each.commands)}"'
        yield f'_tidegate_options["{name}."]="{" ".join(names)}"'
        arguments = [_kind(value, ",") + "..." * value.repeats for value in each.arguments]
        yield f'_tidegate_arguments["{name}."]="{" ".join(arguments)}"'
        for option in each.options:
            if option.value is not None:
                for spelling in option.names:
                    yield f'_tidegate_value["{name} {spelling}"]="{_kind(option.value, " ")}"'


def _kind(value: Value, separator: str) -> str:
    """Return the kind of a value as the script writes it: @KIND, or the choices."""
    return separator.join(value.choices) if value.choices else f"@{value.kind}"
