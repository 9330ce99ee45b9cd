# source <(jaxrl completion bash)
_jaxrl() {
    local line=${COMP_LINE:0:COMP_POINT}
    local last=${line##* } IFS=$'\n'
    COMPREPLY=($(jaxrl completion --line "$line" 2>/dev/null))
    # bash ends a word at "=" and ":", and replaces what stands behind it
    local head=${last%"${last##*[=:]}"}
    COMPREPLY=("${COMPREPLY[@]#"$head"}")
}
complete -o default -o nospace -F _jaxrl jaxrl
